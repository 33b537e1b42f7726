//! Reports requests of unknown Mooncake releases.

use std::collections::HashSet;

use mooncake_wire::Dialect;
use mooncake_wire::rpc::{RpcMethod, unsupported_function};
use parking_lot::Mutex;

/// Maximum number of stored kinds, so that each is logged once. More of them are random bytes rather than releases.
const MAX_REPORTED: usize = 1024;

/// A kind of requests that this master cannot handle.
#[derive(Debug, PartialEq, Eq, Hash)]
enum UnknownForm {
    /// The hash of an RPC's arguments.
    Arguments(RpcMethod, Option<u32>),
    /// The function id of an RPC.
    Function(u32),
}

/// Logs every unknown RPC and argument layout once.
#[derive(Debug, Default)]
pub(crate) struct UnknownFormReporter {
    reported: Mutex<HashSet<UnknownForm>>,
}

impl UnknownFormReporter {
    /// Logs a request whose argument layout no known release has. Returns whether it is new.
    pub(crate) fn report_once(&self, method: RpcMethod, hash: Option<u32>) -> bool {
        let is_new = self.is_new(UnknownForm::Arguments(method, hash));
        if is_new {
            tracing::error!(
                method = method.name(),
                arguments = hash.map(|hash| format!("{hash:08x}")),
                known_releases = %format_args!("{} to {}", Dialect::OLDEST, Dialect::NEWEST),
                "a client uses an unknown Mooncake release: its calls of this RPC fail. Use a known release, or a newer \
                 Moongate"
            );
        }
        is_new
    }

    /// Logs a call of an RPC that this master does not have. Returns whether it is new.
    pub(crate) fn report_function_once(&self, id: u32) -> bool {
        let is_new = self.is_new(UnknownForm::Function(id));
        if is_new {
            match unsupported_function(id) {
                Some(name) => tracing::warn!(
                    method = name,
                    "a client calls an RPC of Mooncake's registry of weights, which this master lacks: store weights as objects"
                ),
                None => tracing::error!(
                    function_id = format!("{id:08x}"),
                    known_releases = %format_args!("{} to {}", Dialect::OLDEST, Dialect::NEWEST),
                    "a client calls an unknown RPC, which fails. Use a known release, or a newer Moongate"
                ),
            }
        }
        is_new
    }

    fn is_new(&self, form: UnknownForm) -> bool {
        let mut reported = self.reported.lock();
        reported.len() < MAX_REPORTED && reported.insert(form)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_unknown_rpc_and_layout_is_logged_once() {
        let releases = UnknownFormReporter::default();
        assert!(releases.report_once(RpcMethod::PutStart, Some(1)));
        assert!(!releases.report_once(RpcMethod::PutStart, Some(1)));
        assert!(releases.report_once(RpcMethod::BatchPutStart, Some(1)));
        assert!(releases.report_once(RpcMethod::PutStart, None));
        assert!(releases.report_function_once(1));
        assert!(!releases.report_function_once(1));
        assert!(releases.report_function_once(2));
        for hash in 0..2 * MAX_REPORTED as u32 {
            releases.report_once(RpcMethod::Ping, Some(hash));
        }
        assert_eq!(releases.reported.lock().len(), MAX_REPORTED);
    }
}
