//! Protocol errors of a peer.

/// The peer's bytes are not ZMTP 3 with the NULL mechanism, or exceed a limit. The connection must be closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpProtocolError {
    /// The first bytes are not a ZMTP signature.
    #[error("the peer does not use ZMTP; check that this is the port of a ZeroMQ socket")]
    NotZmtp,
    /// The peer uses ZMTP 2 or older.
    #[error("the peer uses ZMTP {0}; the oldest supported version is 3.0 (libzmq 4.0)")]
    Version(u8),
    /// The peer requires a security mechanism.
    #[error("the peer requires the security mechanism {0:?}; only NULL is supported")]
    Mechanism(String),
    /// A frame has reserved flags.
    #[error("a frame has the reserved flags {0:#04x}")]
    Flags(u8),
    /// A frame exceeds the size limit.
    #[error("a frame of {length} bytes exceeds the remaining limit of {left} bytes")]
    TooLong {
        /// The length that the frame declares, in bytes.
        length: u64,
        /// Remaining bytes allowed for the message or command.
        left: usize,
    },
    /// A message exceeds the limit of parts.
    #[error("a message has more than {0} parts")]
    TooManyParts(usize),
    /// A command's body does not follow its grammar.
    #[error("malformed command {0}")]
    Command(&'static str),
    /// The READY command has no socket type, or an unknown one.
    #[error("the peer's socket type is missing or unknown")]
    SocketType,
}
