//! Responses that the gateway keeps.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use moka::notification::RemovalCause;
use moka::sync::Cache;
use serde::Deserialize;
use serde_json::value::RawValue;

/// How long a response is kept.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Memory of an entry besides its texts.
const ENTRY_BYTES: usize = 256;

/// Names a response. No tenant can name one of another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ResponseKey {
    pub(crate) tenant: Option<u64>,
    pub(crate) id: Box<str>,
}

/// A response, and the conversation that led to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    /// The whole response.
    pub(crate) response: Bytes,
    /// Items of all inputs and outputs before the response's own output: JSON values, separated by commas.
    pub(crate) input_items: Bytes,
}

/// The responses that clients may refer to: at most a number of bytes, for at most a day.
#[derive(Debug)]
pub(crate) struct ResponseStore {
    responses: Cache<ResponseKey, Arc<StoredResponse>>,
}

/// Members of a response.
#[derive(Deserialize)]
struct ResponseOutput<'a> {
    id: Box<str>,
    #[serde(borrow)]
    output: Vec<&'a RawValue>,
}

/// The last event of a stream.
#[derive(Deserialize)]
struct LastEvent<'a> {
    #[serde(borrow)]
    response: &'a RawValue,
}

impl ResponseStore {
    /// A store of at most `bytes`. `evicted` is called for each response that has no room.
    pub(crate) fn new(bytes: u64, evicted: impl Fn() + Send + Sync + 'static) -> Self {
        let responses = Cache::builder()
            .max_capacity(bytes)
            .weigher(|key: &ResponseKey, stored: &Arc<StoredResponse>| {
                let bytes = key.id.len() + stored.response.len() + stored.input_items.len() + ENTRY_BYTES;
                u32::try_from(bytes).unwrap_or(u32::MAX)
            })
            .time_to_live(LIFETIME)
            .eviction_listener(move |_, _, cause| {
                if cause == RemovalCause::Size {
                    evicted();
                }
            })
            .build();
        Self { responses }
    }

    pub(crate) fn get(&self, key: &ResponseKey) -> Option<Arc<StoredResponse>> {
        self.responses.get(key)
    }

    /// Removes a response; returns whether there was one.
    pub(crate) fn remove(&self, key: &ResponseKey) -> bool {
        self.responses.remove(key).is_some()
    }

    /// Stores a response: its JSON, or the last event of its stream. Returns whether it was one; anything else is not stored.
    pub(crate) fn insert(&self, tenant: Option<u64>, input_items: Bytes, json: &[u8]) -> bool {
        let response = match serde_json::from_slice::<LastEvent<'_>>(json) {
            Ok(event) => event.response.get().as_bytes(),
            Err(_) => json,
        };
        let Ok(ResponseOutput { id, .. }) = serde_json::from_slice(response) else { return false };
        let stored = StoredResponse { response: Bytes::copy_from_slice(response), input_items };
        self.responses.insert(ResponseKey { tenant, id }, Arc::new(stored));
        true
    }
}

impl StoredResponse {
    /// The items with which a request continues the conversation: JSON values, separated by commas.
    pub(crate) fn conversation(&self) -> String {
        let mut items = String::from_utf8_lossy(&self.input_items).into_owned();
        let output = serde_json::from_slice::<ResponseOutput<'_>>(&self.response);
        for item in output.map(|response| response.output).unwrap_or_default() {
            if !items.is_empty() {
                items.push(',');
            }
            items.push_str(item.get());
        }
        items
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn key(tenant: Option<u64>, id: &str) -> ResponseKey {
        ResponseKey { tenant, id: id.into() }
    }

    #[test]
    fn whole_responses_and_last_events_are_stored() {
        let store = ResponseStore::new(1 << 20, || ());
        let response = r#"{"id":"resp_1","output":[{"type":"message"},{"type":"reasoning"}]}"#;
        let event = format!(r#"{{"type":"response.completed","response":{response},"sequence_number":9}}"#);
        for json in [response, &event] {
            assert!(store.insert(Some(7), Bytes::from_static(br#"{"role":"user"}"#), json.as_bytes()));
            let stored = store.get(&key(Some(7), "resp_1")).unwrap();
            assert_eq!(stored.response, response);
            assert_eq!(stored.conversation(), r#"{"role":"user"},{"type":"message"},{"type":"reasoning"}"#);
        }
        assert_eq!(store.get(&key(None, "resp_1")), None, "of another tenant");
        assert!(store.remove(&key(Some(7), "resp_1")) && !store.remove(&key(Some(7), "resp_1")));
    }

    #[test]
    fn other_texts_are_not_stored() {
        let store = ResponseStore::new(1 << 20, || ());
        for json in ["", "{}", r#"{"id":"resp_1"}"#, r#"{"error":{"message":"m"}}"#] {
            assert!(!store.insert(None, Bytes::new(), json.as_bytes()));
        }
        assert_eq!(store.get(&key(None, "resp_1")), None);
    }

    #[test]
    fn the_store_is_bounded() {
        let evicted = Arc::new(AtomicU64::new(0));
        let counter = evicted.clone();
        let count = move || {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        let store = ResponseStore::new(4 * 1024, count);
        for number in 0..100 {
            let response = format!(r#"{{"id":"resp_{number}","output":["{}"]}}"#, "x".repeat(500));
            store.insert(None, Bytes::new(), response.as_bytes());
        }
        store.responses.run_pending_tasks();
        assert!(store.responses.weighted_size() <= 4 * 1024);
        let (kept, evicted) = (store.responses.entry_count(), evicted.load(Ordering::Relaxed));
        assert!(kept > 0 && kept + evicted == 100, "{kept} kept, {evicted} evicted");
    }
}
