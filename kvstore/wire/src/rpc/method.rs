//! The RPCs, each by its name and its type, and how they are recognised.

use std::collections::BTreeMap;
use std::sync::LazyLock;

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
use super::table::rpcs;
use crate::dialect::{Dialect, DialectSet};
use crate::error::ErrorCode;
use crate::pack::{self, TypeSignature};
use crate::types::{
    CopyPlan, MovePlan, NofSegment, NofSegmentOwner, OffloadTasks, PingReply, PromotionAllocation,
    ReplicaDescriptor, ReplicaList, SegmentStatus, StorageConfig, TaskAssignment, TaskReport, Uuid,
};

/// What most RPCs answer.
pub type MasterResult<T> = Result<T, ErrorCode>;

/// What function ids are made of, before the name of the RPC.
const SERVICE: &str = "mooncake::WrappedMasterService::";

/// An RPC as a type, from which follow the types of its arguments and its reply.
pub trait RpcDefinition {
    /// The RPC.
    const METHOD: RpcMethod;
    /// Its arguments, with strings of type `S`.
    type Arguments<S>;
    /// Its reply, with strings of type `S`.
    type Reply<S>;
}

macro_rules! methods {
    ($($(#[$meta:meta])* $method:ident($arguments:ty) -> $reply:ty $(, since $since:ident)?;)+) => {
        /// The RPCs of Mooncake's master.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum RpcMethod {
            $($(#[$meta])* $method,)+
        }

        impl RpcMethod {
            /// Every RPC.
            pub const ALL: &[Self] = &[$(Self::$method),+];

            /// Its name, as Mooncake has it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$method => stringify!($method),)+
                }
            }

            /// The first release that has it, as far as this crate reaches back.
            pub fn since(self) -> Dialect {
                match self {
                    $(Self::$method => pack::layout!(@since $($since)?),)+
                }
            }
        }

        $(
            $(#[$meta])*
            #[derive(Clone, Copy, Debug)]
            pub struct $method;

            impl RpcDefinition for $method {
                const METHOD: RpcMethod = RpcMethod::$method;
                type Arguments<S> = $arguments;
                type Reply<S> = $reply;
            }
        )+

        static SIGNATURES: LazyLock<Vec<MethodSignatures>> = LazyLock::new(|| vec![$(MethodSignatures::of::<$method>()),+]);

        /// A bound that every RPC meets; see [`MethodSignatures::of`].
        trait RpcTypeSignatures: RpcDefinition {
            fn arguments(dialect: Dialect) -> TypeSignature;
            fn reply(dialect: Dialect) -> TypeSignature;
        }

        $(impl RpcTypeSignatures for $method {
            fn arguments(dialect: Dialect) -> TypeSignature {
                TypeSignature::of::<<Self as RpcDefinition>::Arguments<&str>>(dialect)
            }

            fn reply(dialect: Dialect) -> TypeSignature {
                TypeSignature::of::<<Self as RpcDefinition>::Reply<&str>>(dialect)
            }
        })+
    };
}

rpcs!(methods);

/// What arguments and replies of an RPC look like, by the dialect's index. Hashing is too slow to be done again
/// for every message.
struct MethodSignatures {
    function_id: u32,
    arguments: [TypeSignature; Dialect::ALL.len()],
    replies: [TypeSignature; Dialect::ALL.len()],
}

impl MethodSignatures {
    fn of<M: RpcTypeSignatures>() -> Self {
        Self {
            function_id: pack::md5_prefix(format!("{SERVICE}{}", M::METHOD.name()).as_bytes()),
            arguments: Dialect::ALL.map(M::arguments),
            replies: Dialect::ALL.map(M::reply),
        }
    }
}

/// Function ids in ascending order.
static BY_FUNCTION_ID: LazyLock<Vec<(u32, RpcMethod)>> = LazyLock::new(|| {
    let mut ids: Vec<_> = RpcMethod::ALL.iter().map(|method| (method.function_id(), *method)).collect();
    ids.sort_unstable();
    ids
});

impl RpcMethod {
    /// There are forms for every method, in the same order, and in them a signature for every dialect.
    fn signatures(self) -> &'static MethodSignatures {
        &SIGNATURES[self as usize]
    }

    /// The number by which a request calls it.
    pub fn function_id(self) -> u32 {
        self.signatures().function_id
    }

    /// The RPC that is called by that number.
    pub fn from_function_id(id: u32) -> Option<Self> {
        let at = BY_FUNCTION_ID.binary_search_by_key(&id, |(known, _)| *known).ok()?;
        BY_FUNCTION_ID.get(at).map(|(_, method)| *method)
    }

    /// The type of the arguments in a dialect.
    pub fn arguments_signature(self, dialect: Dialect) -> &'static TypeSignature {
        &self.signatures().arguments[dialect.index()]
    }

    /// The type of the reply in a dialect.
    pub fn reply_signature(self, dialect: Dialect) -> &'static TypeSignature {
        &self.signatures().replies[dialect.index()]
    }

    /// The dialects that have this RPC.
    pub fn dialects(self) -> DialectSet {
        Dialect::ALL.into_iter().filter(|dialect| *dialect >= self.since()).collect()
    }

    /// The dialects in which a request's body can be meant. Often it is more than one: then the dialect of
    /// earlier requests on the connection, or from that host, has to decide about the form of the reply.
    /// Empty if no known release makes such a request.
    pub fn request_dialects(self, body: &[u8]) -> DialectSet {
        let hash = pack::type_hash(body);
        let fits = |dialect: &Dialect| {
            let signature = self.arguments_signature(*dialect);
            match hash {
                Some(hash) => !signature.literal().is_empty() && signature.hash() == hash,
                None => signature.literal().is_empty() && body.is_empty(),
            }
        };
        self.dialects().iter().filter(fits).collect()
    }

    /// The dialects in which a reply's body can be meant.
    pub fn reply_dialects(self, body: &[u8]) -> DialectSet {
        let Some(hash) = pack::type_hash(body) else { return DialectSet::EMPTY };
        let fits = |dialect: &Dialect| self.reply_signature(*dialect).hash() == hash;
        self.dialects().iter().filter(fits).collect()
    }
}
