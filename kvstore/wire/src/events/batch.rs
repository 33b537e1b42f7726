//! Payloads: a timestamp, events, and the data-parallel rank of the sender.

use super::reader::{MsgpackReader, MsgpackValue};
use super::{EngineEvent, EventDecodeError};

/// A batch of events published by an engine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineEventBatch<'a> {
    /// The engine's clock, in seconds since 1970.
    pub timestamp: f64,
    /// The data-parallel rank, if the engine sends it.
    pub dp_rank: Option<u32>,
    events: RawEvents<'a>,
}

impl<'a> EngineEventBatch<'a> {
    /// Decodes the payload of a message. All of it is validated as MessagePack; [`events`](Self::events) decodes the events.
    ///
    /// # Errors
    /// [`EventDecodeError::Truncated`] or [`EventDecodeError::Malformed`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, EventDecodeError> {
        let (timestamp, events, dp_rank) = split(payload)?;
        let timestamp = match timestamp {
            MsgpackValue::Float(seconds) => seconds,
            MsgpackValue::Uint(seconds) => seconds as f64,
            _ => return Err(EventDecodeError::Malformed),
        };
        Ok(Self { timestamp, dp_rank, events })
    }

    /// The events in order. An unsupported event yields an error; the others are still decoded.
    pub fn events(
        &self,
    ) -> impl ExactSizeIterator<Item = Result<EngineEvent<'a>, EventDecodeError>> + use<'a> {
        self.events.iter(EngineEvent::read)
    }
}

/// Events in a payload, complete but not decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RawEvents<'a> {
    count: u32,
    bytes: &'a [u8],
}

impl<'a> RawEvents<'a> {
    pub(super) fn iter<E>(
        self,
        read: impl Fn(&mut MsgpackReader<'a>) -> Result<E, EventDecodeError>,
    ) -> impl ExactSizeIterator<Item = Result<E, EventDecodeError>> {
        let mut reader = MsgpackReader::new(self.bytes);
        (0..self.count).map(move |_| {
            let start = reader;
            read(&mut reader).inspect_err(|_| {
                // The event may be read partly. Skipping it cannot fail: it was skipped in `split` already.
                reader = start;
                let _ = reader.skip();
            })
        })
    }
}

/// Timestamp, events and data-parallel rank of a payload. Engines omit a nil rank.
pub(super) fn split(
    payload: &[u8],
) -> Result<(MsgpackValue<'_>, RawEvents<'_>, Option<u32>), EventDecodeError> {
    let mut reader = MsgpackReader::new(payload);
    let MsgpackValue::Array(length @ 2..) = reader.value()? else { return Err(EventDecodeError::Malformed) };
    let timestamp = reader.value()?;
    let MsgpackValue::Array(count) = reader.value()? else { return Err(EventDecodeError::Malformed) };
    let start = reader;
    for _ in 0..count {
        reader.skip()?;
    }
    let bytes = reader.since(&start);
    let dp_rank = if length > 2 { reader.value()? } else { MsgpackValue::Nil };
    let dp_rank = match dp_rank {
        MsgpackValue::Nil => None,
        MsgpackValue::Uint(rank) => Some(u32::try_from(rank).map_err(|_| EventDecodeError::Malformed)?),
        _ => return Err(EventDecodeError::Malformed),
    };
    Ok((timestamp, RawEvents { count, bytes }, dp_rank))
}
