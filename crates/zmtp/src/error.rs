//! Errors of connections and sockets.

use std::io;
use std::time::Duration;

use crate::codec::{ZmtpProtocolError, ZmtpSocketType};

/// Why a connection failed or ended.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// Error of the operating system, including failed name resolution.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer violated ZMTP or exceeded a limit.
    #[error("{0}")]
    Protocol(#[from] ZmtpProtocolError),
    /// The peer rejected the connection with this reason.
    #[error("the peer rejected the connection: {0}")]
    Refused(String),
    /// The socket types are incompatible.
    #[error("the peer is a {theirs} socket, which is incompatible with a {ours} socket", theirs = .theirs.name(), ours = .ours.name())]
    SocketType {
        /// Socket type of this side.
        ours: ZmtpSocketType,
        /// Socket type of the peer.
        theirs: ZmtpSocketType,
    },
    /// The peer sent an unexpected item during the handshake.
    #[error("unexpected item in the peer's handshake")]
    Handshake,
    /// Connecting and the handshake timed out.
    #[error("no ZMTP connection within {0:?}")]
    Timeout(Duration),
    /// A peer exceeds the limit of subscriptions.
    #[error("the peer has more than {0} subscriptions")]
    Subscriptions(usize),
    /// The peer closed the connection normally.
    #[error("the peer closed the connection")]
    Closed,
}
