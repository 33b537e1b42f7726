//! Why a call has no result.

use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::ErrorCode;
use mooncake_wire::frame::RpcFault;
use mooncake_wire::pack::PackError;

/// Why a call has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// No connection. The call was not made.
    #[error("the Mooncake master at {address} cannot be reached: {reason}")]
    Unreachable {
        /// Where the master should be.
        address: Arc<str>,
        /// What went wrong.
        reason: String,
    },
    /// The connection ended before the answer. The call may have been run.
    #[error("{address} ended the connection before it answered: {reason}")]
    Lost {
        /// The master.
        address: Arc<str>,
        /// What went wrong.
        reason: String,
    },
    /// No answer in time. The call may have been run.
    #[error(
        "{address} did not answer within {limit:?}; if it never does, check that it is a master's RPC port"
    )]
    TimedOut {
        /// The master.
        address: Arc<str>,
        /// The time limit.
        limit: Duration,
    },
    /// Something else answers there.
    #[error(
        "{address} is not a Mooncake master: {reason}; give the address of its RPC port, 50051 if not set otherwise"
    )]
    NotMaster {
        /// Where the master should be.
        address: Arc<str>,
        /// What shows it.
        reason: String,
    },
    /// It requires TLS, and this program was not given a certificate.
    #[error("{address} cannot be called: {}", moongate_runtime::TLS_REQUIRED)]
    TlsRequired {
        /// The master.
        address: Arc<str>,
    },
    /// An answer is not as it should be.
    #[error("{address} broke the RPC protocol: {reason}")]
    Protocol {
        /// The master.
        address: Arc<str>,
        /// What is wrong.
        reason: String,
    },
    /// The master takes the arguments in none of the forms that are known.
    #[error(
        "{address} takes the arguments of {method} in no form of Mooncake {oldest} to {newest}: \
         it is another release"
    )]
    UnknownRelease {
        /// The master.
        address: Arc<str>,
        /// What was called.
        method: &'static str,
        /// The oldest release that is known.
        oldest: &'static str,
        /// The newest release that is known.
        newest: &'static str,
    },
    /// More calls are waiting than allowed. The call was not made.
    #[error("too many calls to {address} are waiting")]
    Busy {
        /// The master.
        address: Arc<str>,
    },
    /// The master's own error.
    #[error("the master refused: {0}")]
    Refused(#[from] ErrorCode),
    /// The master did not run the call.
    #[error(transparent)]
    Fault(#[from] RpcFault),
    /// The call cannot be expressed in the master's dialect.
    #[error(transparent)]
    Encode(#[from] PackError),
    /// The client has been shut down.
    #[error("the client has been shut down")]
    Closed,
}
