//! A request of any RPC, for servers.

use super::method::RpcMethod;
use super::table::rpcs;
use crate::dialect::Dialect;
use crate::pack::{Pack, PackError, UnpackError, WireString};
use crate::types::Uuid;
use bytes::BytesMut;

macro_rules! requests {
    ($($(#[$meta:meta])* $method:ident($arguments:ident $(<$string:ident>)?) -> $reply:ty $(, since $since:ident)?;)+) => {
        /// Any request, with its arguments.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Request<S> {
            $($(#[$meta])* $method(super::$arguments $(<$string>)?),)+
        }

        impl<S> Request<S> {
            /// The RPC that the request calls.
            pub fn method(&self) -> RpcMethod {
                match self {
                    $(Self::$method(_) => RpcMethod::$method,)+
                }
            }
        }

        impl<'a, S: WireString<'a>> Request<S> {
            /// Reads the body of a request.
            ///
            /// # Errors
            /// When it does not have the dialect's layout of this RPC's arguments.
            pub fn decode(method: RpcMethod, dialect: Dialect, body: &'a [u8]) -> Result<Self, UnpackError> {
                match method {
                    $(RpcMethod::$method => super::decode_body(method, dialect, body).map(Self::$method),)+
                }
            }
        }

        impl<S: Pack> Request<S> {
            /// Appends a frame with this request.
            ///
            /// # Errors
            /// When the dialect has no such request. Then nothing is appended.
            pub fn encode(&self, sequence: u32, dialect: Dialect, out: &mut BytesMut) -> Result<(), PackError> {
                match self {
                    $(Self::$method(arguments) => {
                        super::encode_arguments(self.method(), sequence, dialect, arguments, out)
                    })+
                }
            }
        }
    };
}

rpcs!(requests);

impl<S> Request<S> {
    /// The client that calls, for requests that clients send regularly.
    pub fn calling_client(&self) -> Option<Uuid> {
        match self {
            Self::MountSegment(arguments) => Some(arguments.client_id),
            Self::ReMountSegment(arguments) => Some(arguments.client_id),
            Self::Ping(arguments) => Some(arguments.client_id),
            Self::FetchTasks(arguments) => Some(arguments.client_id),
            Self::MountLocalDiskSegment(arguments) | Self::OffloadObjectHeartbeat(arguments) => {
                Some(arguments.client_id)
            }
            Self::RegisterPrefetchTask(arguments) => Some(arguments.client_id),
            Self::PutStart(arguments) | Self::UpsertStart(arguments) => Some(arguments.client_id),
            Self::PutEnd(arguments) | Self::UpsertEnd(arguments) => Some(arguments.client_id),
            Self::PutRevoke(arguments) | Self::UpsertRevoke(arguments) => Some(arguments.client_id),
            Self::BatchPutStart(arguments) | Self::BatchUpsertStart(arguments) => Some(arguments.client_id),
            Self::BatchPutEnd(arguments) => Some(arguments.client_id),
            Self::BatchPutRevoke(arguments) => Some(arguments.client_id),
            _ => None,
        }
    }
}
