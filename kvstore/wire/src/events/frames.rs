//! The ZeroMQ frames of one message.

use super::EventDecodeError;

/// Sequence number of a replay's end marker.
const END: u64 = u64::MAX;

/// A message of a publisher, or a response of its replay socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventFrames<'a> {
    /// The topic; empty if the sender omits it, as old replay sockets do.
    pub topic: &'a [u8],
    /// Sequence number of the message. A gap means lost messages, a smaller number a restart of the publisher.
    pub sequence: u64,
    pub payload: &'a [u8],
}

impl<'a> EventFrames<'a> {
    /// Parses the parts of a message. Parts before the topic (the envelope of a replay) are skipped.
    ///
    /// # Errors
    /// [`EventDecodeError::Frames`].
    pub fn parse(parts: &'a [impl AsRef<[u8]>]) -> Result<Self, EventDecodeError> {
        let [before @ .., sequence, payload] = parts else { return Err(EventDecodeError::Frames) };
        let sequence = sequence.as_ref().try_into().map_err(|_| EventDecodeError::Frames)?;
        Ok(Self {
            topic: before.last().map_or(&[], AsRef::as_ref),
            sequence: u64::from_be_bytes(sequence),
            payload: payload.as_ref(),
        })
    }

    /// Whether this is the end marker of a replay, which has no batch.
    pub fn ends_replay(&self) -> bool {
        self.sequence == END && self.payload.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_and_payload_are_the_last_frames() {
        let seven = 7_u64.to_be_bytes();
        let parse = |parts: &[&'static [u8]]| {
            EventFrames::parse(parts).map(|frames| (frames.topic.to_vec(), frames.ends_replay()))
        };
        assert_eq!(
            EventFrames::parse(&[b"kv".as_slice(), &seven, b"x"]).map(|frames| frames.sequence),
            Ok(7)
        );
        assert_eq!(parse(&[b"kv", &[0; 8], b"x"]), Ok((b"kv".to_vec(), false)));
        assert_eq!(parse(&[b"", b"kv", &[0; 8], b"x"]), Ok((b"kv".to_vec(), false)));
        assert_eq!(parse(&[&[0; 8], b"x"]), Ok((Vec::new(), false)));
        assert_eq!(parse(&[b"", &[0xff; 8], b""]), Ok((Vec::new(), true)));
        assert_eq!(parse(&[b"kv", &[0; 7], b"x"]), Err(EventDecodeError::Frames));
        assert_eq!(parse(&[b"x"]), Err(EventDecodeError::Frames));
        assert_eq!(parse(&[]), Err(EventDecodeError::Frames));
    }
}
