//! Which engine has made a response.

use std::time::Duration;

use memchr::memmem;
use moka::sync::Cache;
use moongate_discovery::InstanceId;

/// Most responses whose engine is recorded.
const MAX_RESPONSES: u64 = 100_000;
/// How long an engine is recorded without a request for its response.
const IDLE_TIME: Duration = Duration::from_secs(24 * 3600);
/// Longest id that is recorded.
const MAX_ID_LEN: usize = 128;

/// The engines that have made recent responses.
#[derive(Debug)]
pub(crate) struct ResponseOwners {
    engines: Cache<Box<str>, InstanceId>,
}

impl Default for ResponseOwners {
    fn default() -> Self {
        Self { engines: Cache::builder().max_capacity(MAX_RESPONSES).time_to_idle(IDLE_TIME).build() }
    }
}

impl ResponseOwners {
    pub(crate) fn get(&self, response: &str) -> Option<InstanceId> {
        self.engines.get(response)
    }

    pub(crate) fn record(&self, response: &str, engine: InstanceId) {
        self.engines.insert(response.into(), engine);
    }
}

/// The id of a response in its JSON, or in the first event of its stream. Both engines' ids begin with `resp_`.
pub(crate) fn response_id(start: &[u8]) -> Option<&str> {
    let at = memmem::find_iter(start, b"\"resp_").find(|at| {
        let before = start[..*at].trim_ascii_end();
        before.strip_suffix(b":").is_some_and(|before| before.trim_ascii_end().ends_with(b"\"id\""))
    })?;
    let id = start.get(at + 1..)?;
    let id = std::str::from_utf8(id.get(..memchr::memchr(b'"', id)?)?).ok()?;
    (id.len() <= MAX_ID_LEN).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_read_from_json_and_events() {
        assert_eq!(response_id(br#"{"id":"resp_1","output":[]}"#), Some("resp_1"));
        let event = b"event: response.created\ndata: {\"response\":{\"previous_response_id\":\"resp_0\", \"id\" : \"resp_2\"}}\n\n";
        assert_eq!(response_id(event), Some("resp_2"));
        for other in
            [&b"{}"[..], br#"{"id":"msg_1"}"#, br#"{"id":"resp_1"#, br#"{"text":"\"id\":\"resp_x\""}"#]
        {
            assert_eq!(response_id(other), None, "{}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn owners_are_recorded() {
        let owners = ResponseOwners::default();
        owners.record("resp_1", InstanceId::from("engine"));
        assert_eq!(owners.get("resp_1"), Some(InstanceId::from("engine")));
        assert_eq!(owners.get("resp_2"), None);
    }
}
