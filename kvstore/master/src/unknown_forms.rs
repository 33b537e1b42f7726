//! Reports requests of unknown Mooncake releases.

use std::collections::HashSet;

use mooncake_wire::Dialect;
use mooncake_wire::rpc::RpcMethod;
use parking_lot::Mutex;

/// Maximum number of stored layouts, so that each is logged once. More of them are random bytes rather than releases.
const MAX_REPORTED: usize = 1024;

/// Logs every unknown argument layout once.
#[derive(Debug, Default)]
pub(crate) struct UnknownFormReporter {
    reported: Mutex<HashSet<(RpcMethod, Option<u32>)>>,
}

impl UnknownFormReporter {
    /// Logs a request whose argument layout no known release has. Returns whether it is new.
    pub(crate) fn report_once(&self, method: RpcMethod, hash: Option<u32>) -> bool {
        let mut reported = self.reported.lock();
        let is_new = reported.len() < MAX_REPORTED && reported.insert((method, hash));
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_unknown_layout_is_logged_once() {
        let releases = UnknownFormReporter::default();
        assert!(releases.report_once(RpcMethod::PutStart, Some(1)));
        assert!(!releases.report_once(RpcMethod::PutStart, Some(1)));
        assert!(releases.report_once(RpcMethod::BatchPutStart, Some(1)));
        assert!(releases.report_once(RpcMethod::PutStart, None));
        for hash in 0..2 * MAX_REPORTED as u32 {
            releases.report_once(RpcMethod::Ping, Some(hash));
        }
        assert_eq!(releases.reported.lock().len(), MAX_REPORTED);
    }
}
