//! Errors of RPC calls.

use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::ErrorCode;
use mooncake_wire::frame::RpcFault;
use mooncake_wire::pack::PackError;

/// Why an RPC call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// No connection could be opened. The call was not sent.
    #[error("the Mooncake master at {address} cannot be reached: {reason}")]
    Unreachable { address: Arc<str>, reason: String },
    /// The connection ended before the response. The call may have been executed.
    #[error("{address} closed the connection before it responded: {reason}")]
    Lost { address: Arc<str>, reason: String },
    /// No response in time. The call may have been executed.
    #[error(
        "{address} did not respond within {limit:?}; if this persists, check that it is a master's RPC port"
    )]
    TimedOut { address: Arc<str>, limit: Duration },
    /// Another kind of server listens at the address.
    #[error(
        "{address} is not a Mooncake master: {reason}; give the address of its RPC port, 50051 by default"
    )]
    NotMaster { address: Arc<str>, reason: String },
    /// The master requires TLS, but this program has no certificate.
    #[error("{address} cannot be called: {}", moongate_runtime::TLS_REQUIRED)]
    TlsRequired { address: Arc<str> },
    /// A response violates the protocol.
    #[error("{address} violated the RPC protocol: {reason}")]
    Protocol { address: Arc<str>, reason: String },
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
