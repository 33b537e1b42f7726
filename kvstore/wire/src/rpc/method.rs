//! RPC methods: names, types, function ids and type signatures.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::table::rpcs;
use crate::dialect::{Dialect, DialectSet};
use crate::error::ErrorCode;
use crate::pack::{self, TypeSignature};
use crate::types::{
    CopyPlan, MovePlan, NofSegment, NofSegmentOwner, OffloadTasks, PingReply, PromotionAllocation,
    ReplicaDescriptor, ReplicaList, SegmentStatus, StorageConfig, TaskAssignment, TaskReport, Uuid,
};

/// Result type of most RPCs.
pub type MasterResult<T> = Result<T, ErrorCode>;

/// Prefix of the RPC's name in the text whose MD5 is the function id.
const SERVICE: &str = "mooncake::WrappedMasterService::";

/// Function id of the RPC with this name.
pub(super) fn function_id_of(name: &str) -> u32 {
    pack::md5_prefix(format!("{SERVICE}{name}").as_bytes())
}

/// An RPC as a type, with the types of its arguments and its reply.
pub trait RpcDefinition {
    const METHOD: RpcMethod;
    /// Type of the arguments, with strings of type `S`.
    type Arguments<S>;
    /// Type of the reply, with strings of type `S`.
    type Reply<S>;
}

macro_rules! methods {
    ($($(#[$meta:meta])* $method:ident($arguments:ident $(<$string:ident>)?) -> $reply:ty $(, since $since:ident)?;)+) => {
        /// The RPCs of Mooncake's master.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum RpcMethod {
            $($(#[$meta])* $method,)+
        }

        impl RpcMethod {
            pub const ALL: &[Self] = &[$(Self::$method),+];

            /// Name of the RPC in Mooncake.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$method => stringify!($method),)+
                }
            }

            /// The oldest supported dialect that has the RPC.
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
                type Arguments<S> = super::$arguments $(<$string>)?;
                type Reply<S> = $reply;
            }
        )+

        static SIGNATURES: LazyLock<Vec<MethodSignatures>> = LazyLock::new(|| vec![$(MethodSignatures::of::<$method>()),+]);

        /// A trait that every RPC implements; see [`MethodSignatures::of`].
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

/// Type signatures of an RPC's arguments and replies by dialect index, cached because hashing per message is too slow.
struct MethodSignatures {
    function_id: u32,
    arguments: [TypeSignature; Dialect::ALL.len()],
    replies: [TypeSignature; Dialect::ALL.len()],
}

impl MethodSignatures {
    fn of<M: RpcTypeSignatures>() -> Self {
        Self {
            function_id: function_id_of(M::METHOD.name()),
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
    /// The method's signatures, which are listed in the order of the enum.
    fn signatures(self) -> &'static MethodSignatures {
        &SIGNATURES[self as usize]
    }

    /// Function id of the RPC in requests.
    pub fn function_id(self) -> u32 {
        self.signatures().function_id
    }

    /// The RPC with this function id.
    pub fn from_function_id(id: u32) -> Option<Self> {
        let index = BY_FUNCTION_ID.binary_search_by_key(&id, |(known, _)| *known).ok()?;
        BY_FUNCTION_ID.get(index).map(|(_, method)| *method)
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

    /// The dialects in which a request's body is valid. With more than one, the dialect of earlier requests on the connection, or
    /// from that host, must determine the dialect of the reply. Empty if no known release sends such a request.
    pub fn request_dialects(self, body: &[u8]) -> DialectSet {
        if body.is_empty() {
            let fits = |dialect: &Dialect| self.arguments_signature(*dialect).literal().is_empty();
            return self.dialects().iter().filter(fits).collect();
        }
        matching(body, self.dialects(), |dialect| self.arguments_signature(dialect))
    }

    /// The dialects in which a reply's body is valid.
    pub fn reply_dialects(self, body: &[u8]) -> DialectSet {
        matching(body, self.dialects(), |dialect| self.reply_signature(dialect))
    }
}

/// The dialects of which a signature matches a packed value. Dialects that differ only in compatible members differ in
/// whether the value states its size.
fn matching(
    body: &[u8],
    dialects: DialectSet,
    signature_of: impl Fn(Dialect) -> &'static TypeSignature,
) -> DialectSet {
    let Some(hash) = pack::type_hash(body) else { return DialectSet::EMPTY };
    let states_size = pack::states_size(body);
    let (mut fits, mut fits_exactly) = (DialectSet::EMPTY, DialectSet::EMPTY);
    for dialect in dialects.iter() {
        let signature = signature_of(dialect);
        // No message of a type without literal has a body.
        if signature.hash() == hash && !signature.literal().is_empty() {
            fits.insert(dialect);
            if signature.has_compatible() == states_size {
                fits_exactly.insert(dialect);
            }
        }
    }
    // A later release may have added the first compatible members of a type.
    if fits_exactly.is_empty() { fits } else { fits_exactly }
}
