//! Requests of releases that are not known.

use std::collections::HashSet;

use mooncake_wire::Dialect;
use mooncake_wire::rpc::RpcMethod;
use parking_lot::Mutex;

/// Forms that are remembered, so that each is told once. More than this is not drift but noise.
const MAX_REPORTED: usize = 1024;

/// Tells of every unknown form of arguments once.
#[derive(Debug, Default)]
pub(crate) struct UnknownFormReporter {
    reported: Mutex<HashSet<(RpcMethod, Option<u32>)>>,
}

impl UnknownFormReporter {
    /// A request has arguments of a form that no known release has. Returns whether that is news.
    pub(crate) fn report_once(&self, method: RpcMethod, hash: Option<u32>) -> bool {
        let mut told = self.reported.lock();
        let is_news = told.len() < MAX_REPORTED && told.insert((method, hash));
        if is_news {
            tracing::error!(
                method = method.name(),
                arguments = hash.map(|hash| format!("{hash:08x}")),
                known = %format_args!("{} to {}", Dialect::OLDEST, Dialect::NEWEST),
                "a client speaks a release of Mooncake that is not known: its calls of this kind fail. Use a release \
                 that is known, or a newer moongate"
            );
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_is_told_once() {
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
