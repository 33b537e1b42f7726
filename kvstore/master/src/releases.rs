//! Requests of releases that are not known.

use std::collections::HashSet;

use mooncake_wire::Dialect;
use mooncake_wire::rpc::Method;
use parking_lot::Mutex;

/// Forms that are remembered, so that each is told once. More than this is not drift but noise.
const REMEMBERED: usize = 1024;

/// Tells of every unknown form of arguments once.
#[derive(Debug, Default)]
pub(crate) struct Releases {
    told: Mutex<HashSet<(Method, Option<u32>)>>,
}

impl Releases {
    /// A request has arguments of a form that no known release has. Returns whether that is news.
    pub(crate) fn unknown(&self, method: Method, hash: Option<u32>) -> bool {
        let mut told = self.told.lock();
        let is_news = told.len() < REMEMBERED && told.insert((method, hash));
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
        let releases = Releases::default();
        assert!(releases.unknown(Method::PutStart, Some(1)));
        assert!(!releases.unknown(Method::PutStart, Some(1)));
        assert!(releases.unknown(Method::BatchPutStart, Some(1)));
        assert!(releases.unknown(Method::PutStart, None));
        for hash in 0..2 * REMEMBERED as u32 {
            releases.unknown(Method::Ping, Some(hash));
        }
        assert_eq!(releases.told.lock().len(), REMEMBERED);
    }
}
