//! Errors of decoding events.

/// Why a message cannot be decoded as events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EventDecodeError {
    /// The message does not have the frames of an event message.
    #[error("unexpected frames: an event message has a topic, an 8-byte sequence number and a payload")]
    Frames,
    /// The payload ends within a value.
    #[error("the payload ends in the middle of a value")]
    Truncated,
    /// The payload is not MessagePack, or not a batch.
    #[error("the payload is not a batch of events")]
    Malformed,
    /// A field has an unexpected type, or a number is out of range.
    #[error("unexpected value of {0}")]
    Unexpected(&'static str),
    /// A required field is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// An unknown kind of event. Newer engines may send more kinds.
    #[error("unknown kind of event")]
    UnknownKind,
}
