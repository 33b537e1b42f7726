//! What can be wrong with an event.

/// Bytes are not the event that they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EventDecodeError {
    /// A message has other frames than events have.
    #[error("not the frames of an event: topic, 8-byte sequence number, payload")]
    Frames,
    /// The payload ends too early.
    #[error("the payload ends in the middle of a value")]
    Truncated,
    /// The payload is not MessagePack, or not a batch.
    #[error("the payload is not a batch of events")]
    Malformed,
    /// A member has another type than expected, or a number is out of range.
    #[error("unexpected value of {0}")]
    Unexpected(&'static str),
    /// A member that every such event has is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A kind of event that is not known. Newer engines may have more.
    #[error("unknown kind of event")]
    UnknownKind,
}
