//! The frames of one message.

use super::EventDecodeError;

/// Sequence number of a replay's end marker.
const END: u64 = u64::MAX;

/// A message of a publisher, or an answer of its replay socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventFrames<'a> {
    /// The topic; empty where the sender left it away, as old replay sockets do.
    pub topic: &'a [u8],
    /// Counts a publisher's messages. A gap means lost ones, a smaller number a restart.
    pub sequence: u64,
    /// The batch.
    pub payload: &'a [u8],
}

impl<'a> EventFrames<'a> {
    /// Takes the parts of a message. Parts before the topic (a replay's envelope) are passed over.
    ///
    /// # Errors
    /// [`EventDecodeError::EventFrames`].
    pub fn parse(parts: &'a [impl AsRef<[u8]>]) -> Result<Self, EventDecodeError> {
        let [before @ .., sequence, payload] = parts else { return Err(EventDecodeError::Frames) };
        let sequence = sequence.as_ref().try_into().map_err(|_| EventDecodeError::Frames)?;
        Ok(Self {
            topic: before.last().map_or(&[], AsRef::as_ref),
            sequence: u64::from_be_bytes(sequence),
            payload: payload.as_ref(),
        })
    }

    /// Whether this ends a replay, and carries no batch.
    pub fn ends_replay(&self) -> bool {
        self.sequence == END && self.payload.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_from_the_end() {
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
