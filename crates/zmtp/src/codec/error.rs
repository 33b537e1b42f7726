//! What a peer can get wrong.

/// The peer's bytes are not ZMTP 3 with the NULL mechanism, or exceed a limit. The connection cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpProtocolError {
    /// The first bytes are not a ZMTP signature.
    #[error("the peer does not speak ZMTP; is this the port of a ZeroMQ socket?")]
    NotZmtp,
    /// The peer speaks ZMTP 2 or older.
    #[error("the peer speaks ZMTP {0}; 3.0 is the oldest that is supported (libzmq 4.0)")]
    Version(u8),
    /// The peer wants a security mechanism.
    #[error("the peer wants the security mechanism {0:?}; only NULL is supported")]
    Mechanism(String),
    /// A frame has flags that ZMTP 3 reserves.
    #[error("a frame has the reserved flags {0:#04x}")]
    Flags(u8),
    /// A frame is longer than allowed.
    #[error("a frame of {length} bytes exceeds what is left of the limit, {left}")]
    TooLong {
        /// The length that the frame declares, in bytes.
        length: u64,
        /// What the message (or command) may still have, in bytes.
        left: usize,
    },
    /// A message has more parts than allowed.
    #[error("a message has more than {0} parts")]
    TooManyParts(usize),
    /// A command's body does not follow its grammar.
    #[error("malformed command {0}")]
    Command(&'static str),
    /// The READY command names no socket type, or one that does not exist.
    #[error("the peer names no known socket type")]
    SocketType,
}
