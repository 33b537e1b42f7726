//! Errors of RPC calls.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::ErrorCode;
use mooncake_wire::frame::{FrameError, RpcFault};
use mooncake_wire::pack::{PackError, UnpackError};
use mooncake_wire::shards::ShardIdentity;
use moongate_runtime::describe_tls_error;

use super::leader_lookup::LeaderLookupError;
use super::master_address::MasterAddressError;

/// Why an RPC call failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RpcError {
    /// No connection could be opened. The call was not sent.
    #[error("the Mooncake master at {address} cannot be reached: {source}")]
    Unreachable { address: Arc<str>, source: MasterConnectError },
    /// The connection ended before the response. The call may have been executed.
    #[error("{address} closed the connection before it responded: {source}")]
    Lost { address: Arc<str>, source: ConnectionLossError },
    /// No response in time. The call may have been executed.
    #[error(
        "{address} did not respond within {limit:?}; if this persists, check that it is a master's RPC port"
    )]
    TimedOut { address: Arc<str>, limit: Duration },
    /// Another kind of server listens at the address.
    #[error(
        "{address} is not a Mooncake master: {source}; give the address of its RPC port, 50051 by default"
    )]
    NotMaster { address: Arc<str>, source: FrameError },
    /// The master requires TLS, but this program has no certificate.
    #[error("{address} cannot be called: {}", moongate_runtime::TLS_REQUIRED)]
    TlsRequired { address: Arc<str> },
    /// A response violates the protocol.
    #[error("{address} violated the RPC protocol: {source}")]
    Protocol { address: Arc<str>, source: RpcProtocolError },
    /// The master is not the expected shard of its store.
    #[error(
        "the master at {address} {} instead of shard {expected}; give the masters in the order of their --shard",
        actual.map_or_else(|| "has no --shard".to_owned(), |actual| format!("is shard {actual}"))
    )]
    OtherShard { address: Arc<str>, expected: ShardIdentity, actual: Option<ShardIdentity> },
    /// The master accepts the arguments in no known format.
    #[error(
        "{address} accepts the arguments of {method} in no format of Mooncake {oldest} to {newest}: \
         its release is not supported"
    )]
    UnknownRelease {
        address: Arc<str>,
        method: &'static str,
        /// Oldest supported release of Mooncake.
        oldest: &'static str,
        /// Newest supported release of Mooncake.
        newest: &'static str,
    },
    /// The queues of waiting calls are full. The call was not sent.
    #[error("too many calls to {address} are waiting")]
    Busy { address: Arc<str> },
    /// The master returned this error code.
    #[error("the master refused: {0}")]
    Refused(#[from] ErrorCode),
    /// The master rejected the call before executing it.
    #[error(transparent)]
    Fault(#[from] RpcFault),
    /// The call cannot be expressed in the master's dialect.
    #[error(transparent)]
    Encode(#[from] PackError),
    /// The client has been shut down.
    #[error("the client has been shut down")]
    Closed,
}

impl RpcError {
    /// Whether the call may have been executed although there is no response.
    #[must_use]
    pub fn is_response_lost(&self) -> bool {
        match self {
            Self::Lost { .. } | Self::TimedOut { .. } => true,
            Self::Refused(code) => code.is_no_response(),
            _ => false,
        }
    }
}

/// Why no connection to a master was opened.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MasterConnectError {
    /// The configured address is invalid. [`RpcError::Unreachable`] names it, so this message does not.
    #[error("{}", .0.reason)]
    Address(MasterAddressError),
    #[error(transparent)]
    Lookup(#[from] LeaderLookupError),
    /// The socket or TLS failed.
    #[error("{0}")]
    Io(#[source] Arc<io::Error>),
    #[error("no connection within {0:?}")]
    TimedOut(Duration),
}

/// How a connection ended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConnectionLossError {
    /// The peer closed the connection.
    #[error("end of stream")]
    EndOfStream,
    /// The socket or TLS failed.
    #[error("{}", describe_tls_error(.0))]
    Io(#[source] Arc<io::Error>),
}

/// How a response violates the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RpcProtocolError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Body(#[from] UnpackError),
    /// A batch has another number of results than requested.
    #[error("the response to a request for {requested} objects has {results} results")]
    ResultCount { requested: usize, results: usize },
    /// A node with a disk staged another number of objects than requested.
    #[error("it staged {0} objects instead of one")]
    StagedCount(usize),
}
