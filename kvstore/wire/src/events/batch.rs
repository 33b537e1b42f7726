//! A payload: a timestamp, events, and the data-parallel rank that they are of.

use super::reader::{Reader, Value};
use super::{DecodeError, Event};

/// Events that an engine published together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Batch<'a> {
    /// The engine's clock, in seconds since 1970.
    pub timestamp: f64,
    /// The data-parallel rank, where the engine says it.
    pub dp_rank: Option<u32>,
    events: RawEvents<'a>,
}

impl<'a> Batch<'a> {
    /// Reads the payload of a message. The whole of it is checked to be MessagePack; events are read by [`events`](Self::events).
    ///
    /// # Errors
    /// [`DecodeError::Truncated`] or [`DecodeError::Malformed`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, DecodeError> {
        let (timestamp, events, dp_rank) = split(payload)?;
        let timestamp = match timestamp {
            Value::Float(seconds) => seconds,
            Value::Uint(seconds) => seconds as f64,
            _ => return Err(DecodeError::Malformed),
        };
        Ok(Self { timestamp, dp_rank, events })
    }

    /// The events in order. One that is not understood is an error; the rest can be read all the same.
    pub fn events(&self) -> impl ExactSizeIterator<Item = Result<Event<'a>, DecodeError>> + use<'a> {
        self.events.iter(Event::read)
    }
}

/// Events as they stand in a payload, complete but not understood yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RawEvents<'a> {
    count: u32,
    bytes: &'a [u8],
}

impl<'a> RawEvents<'a> {
    pub(super) fn iter<E>(
        self,
        read: impl Fn(&mut Reader<'a>) -> Result<E, DecodeError>,
    ) -> impl ExactSizeIterator<Item = Result<E, DecodeError>> {
        let mut reader = Reader::new(self.bytes);
        (0..self.count).map(move |_| {
            let start = reader;
            read(&mut reader).inspect_err(|_| {
                // The event may have been left half-way; it was skipped without an error before.
                reader = start;
                let _ = reader.skip();
            })
        })
    }
}

/// Timestamp, events and data-parallel rank of a payload. Engines leave the rank away if it is nil.
pub(super) fn split(payload: &[u8]) -> Result<(Value<'_>, RawEvents<'_>, Option<u32>), DecodeError> {
    let mut reader = Reader::new(payload);
    let Value::Array(length @ 2..) = reader.value()? else { return Err(DecodeError::Malformed) };
    let timestamp = reader.value()?;
    let Value::Array(count) = reader.value()? else { return Err(DecodeError::Malformed) };
    let start = reader;
    for _ in 0..count {
        reader.skip()?;
    }
    let bytes = reader.since(&start);
    let dp_rank = if length > 2 { reader.value()? } else { Value::Nil };
    let dp_rank = match dp_rank {
        Value::Nil => None,
        Value::Uint(rank) => Some(u32::try_from(rank).map_err(|_| DecodeError::Malformed)?),
        _ => return Err(DecodeError::Malformed),
    };
    Ok((timestamp, RawEvents { count, bytes }, dp_rank))
}
