//! RPCs of Mooncake's master that are known by name only.

use std::sync::LazyLock;

use super::method::function_id_of;
use crate::frame::RpcFault;

/// Mooncake's registry of model weights (since 0.3.14).
const WEIGHTS: [&str; 11] = [
    "BeginWeightImport",
    "CommitWeightImport",
    "AbortWeightImport",
    "GetWeightRevision",
    "ListWeightRevisions",
    "DeleteWeightRevision",
    "AcquireWeightRevisionLease",
    "RenewWeightRevisionLease",
    "ReleaseWeightRevisionLease",
    "StartWeightResidencyOperation",
    "QueryWeightOperation",
];

static FUNCTION_IDS: LazyLock<[(u32, &str); WEIGHTS.len()]> =
    LazyLock::new(|| WEIGHTS.map(|name| (function_id_of(name), name)));

/// The name of an unsupported RPC with this function id, if it is known.
pub fn unsupported_function(id: u32) -> Option<&'static str> {
    FUNCTION_IDS.iter().find(|(known, _)| *known == id).map(|(_, name)| *name)
}

/// The response to an RPC that this library does not know, or knows but does not support.
pub fn unsupported_fault(id: u32) -> RpcFault {
    match unsupported_function(id) {
        Some(name) => RpcFault {
            code: RpcFault::NOT_REGISTERED,
            message: format!(
                "{name} is not supported: this master has no registry of weights. Store weights as objects, with \
                 put_from or put_tensor and with_hard_pin"
            ),
        },
        None => RpcFault::not_registered(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_rpcs_are_refused_with_an_alternative() {
        let id = function_id_of("BeginWeightImport");
        assert_eq!(unsupported_function(id), Some("BeginWeightImport"));
        let fault = unsupported_fault(id);
        assert_eq!(fault.code, RpcFault::NOT_REGISTERED);
        assert!(fault.message.contains("put_tensor"), "{}", fault.message);
        assert_eq!(unsupported_fault(1), RpcFault::not_registered());
        for (id, name) in *FUNCTION_IDS {
            assert_eq!(super::super::RpcMethod::from_function_id(id), None, "{name}");
        }
    }
}
