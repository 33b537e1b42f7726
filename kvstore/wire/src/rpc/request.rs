//! A request whose RPC is known only when it arrives.

use super::arguments::{
    BatchEvictDiskArguments, BatchPutEndArguments, BatchPutRevokeArguments, BatchPutStartArguments,
    BatchRemoveArguments, BatchUpsertEndArguments, BatchUpsertRevokeArguments, ClientArguments,
    ClientKeyArguments, ClientsArguments, CompleteTaskArguments, CopyStartArguments, CopyTaskArguments,
    DynamicCopyEndArguments, DynamicCopyStartArguments, EvictDiskArguments, FetchTasksArguments,
    GracefulUnmountArguments, KeyArguments, KeysArguments, MountArguments, MountNofArguments,
    MoveStartArguments, MoveTaskArguments, NoArguments, OffloadedArguments, OffloadingArguments,
    PromotionArguments, PutEndArguments, PutRevokeArguments, PutStartArguments, RemountArguments,
    RemountNofArguments, RemoveAllArguments, RemoveArguments, ReplicaClearArguments, SegmentIdArguments,
    SegmentNameArguments, SsdCapacityArguments, TaskArguments, UnmountArguments,
};
use super::method::Method;
use super::table::rpcs;
use crate::dialect::Dialect;
use crate::pack::{DecodeError, EncodeError, Pack, Text};
use bytes::BytesMut;

macro_rules! requests {
    ($($(#[$meta:meta])* $method:ident($arguments:ty) -> $reply:ty $(, since $since:ident)?;)+) => {
        /// Any request, with its arguments.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Request<S> {
            $($(#[$meta])* $method($arguments),)+
        }

        impl<S> Request<S> {
            /// Which RPC it calls.
            pub fn method(&self) -> Method {
                match self {
                    $(Self::$method(_) => Method::$method,)+
                }
            }
        }

        impl<'a, S: Text<'a>> Request<S> {
            /// Reads the body of a request.
            ///
            /// # Errors
            /// When it is not in the form that the dialect has for the arguments of this RPC.
            pub fn decode(method: Method, dialect: Dialect, body: &'a [u8]) -> Result<Self, DecodeError> {
                match method {
                    $(Method::$method => super::decode_body(method, dialect, body).map(Self::$method),)+
                }
            }
        }

        impl<S: Pack> Request<S> {
            /// Appends a frame with this request.
            ///
            /// # Errors
            /// When the dialect has no such request. Then nothing is appended.
            pub fn encode(&self, sequence: u32, dialect: Dialect, out: &mut BytesMut) -> Result<(), EncodeError> {
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
