//! What has to change in a client's headers, so that the engine gets those that the gateway would send.

use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue};

/// Headers that the proxy writes itself for its connection to the engine.
const OF_PROXY: [HeaderName; 8] =
    [CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

/// Changes of a request's headers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeaderChanges {
    /// These replace all values of their names.
    pub set: Vec<(HeaderName, HeaderValue)>,
    pub remove: Vec<HeaderName>,
}

impl HeaderChanges {
    /// From the client's headers to those for the engine. Of a name with several values only the last counts; the gateway adds none.
    pub(super) fn between(client: &HeaderMap, engine: &HeaderMap) -> Self {
        let removed = client.keys().filter(|name| !engine.contains_key(*name) && !OF_PROXY.contains(name));
        let is_changed = |name: &&HeaderName| !client.get_all(*name).iter().eq(engine.get_all(*name).iter());
        let changed = engine.keys().filter(is_changed);
        let set =
            changed.filter_map(|name| Some((name.clone(), engine.get_all(name).iter().next_back()?.clone())));
        Self { set: set.collect(), remove: removed.cloned().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let named = |&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value));
        list.iter().map(named).collect()
    }

    #[test]
    fn only_differences_are_sent() {
        let client = headers(&[
            ("host", "a"),
            ("x-same", "1"),
            ("traceparent", "old"),
            ("x-prefiller-host-port", "evil:1"),
            ("accept-encoding", "gzip"),
        ]);
        let engine = headers(&[("x-same", "1"), ("traceparent", "new"), ("x-request-id", "r")]);
        let HeaderChanges { mut set, mut remove } = HeaderChanges::between(&client, &engine);
        set.sort_by(|left, right| left.0.as_str().cmp(right.0.as_str()));
        remove.sort_by(|left, right| left.as_str().cmp(right.as_str()));
        let names: Vec<_> =
            set.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(names, [("traceparent", "new"), ("x-request-id", "r")]);
        assert_eq!(remove, ["accept-encoding", "x-prefiller-host-port"]);
    }
}
