//! Why a connection could not be had, or has ended.

use std::io;
use std::time::Duration;

use crate::codec::{ZmtpProtocolError, ZmtpSocketType};

/// Why a connection could not be had, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// What the kernel said; a name that cannot be resolved is among this.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer's bytes are not what ZMTP or our limits allow.
    #[error("{0}")]
    Protocol(#[from] ZmtpProtocolError),
    /// The peer refused us, in its own words.
    #[error("the peer refused the connection: {0}")]
    Refused(String),
    /// The peer is a socket that ours cannot talk to.
    #[error("the peer is a {theirs} socket, to which a {ours} socket cannot talk", theirs = .theirs.name(), ours = .ours.name())]
    SocketType {
        /// Our kind.
        ours: ZmtpSocketType,
        /// The peer's kind.
        theirs: ZmtpSocketType,
    },
    /// The peer sent something before its part of the handshake was done.
    #[error("the peer broke the order of the handshake")]
    Handshake,
    /// Connecting or the handshake took too long.
    #[error("no ZMTP connection within {0:?}")]
    Timeout(Duration),
    /// A peer has more subscriptions than allowed.
    #[error("the peer has more than {0} subscriptions")]
    Subscriptions(usize),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
}
