//! Responses of an engine that clients can retrieve, cancel and continue.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// Maximum number of stored responses. The real engines keep all.
const MAX_RESPONSES: usize = 1024;
/// Maximum size of all stored responses and conversations, in bytes of JSON.
const MAX_BYTES: usize = 128 * 1024 * 1024;

#[derive(Debug, Clone)]
pub(crate) struct StoredResponse {
    pub(crate) response: Value,
    /// The conversation before it.
    pub(crate) history: Vec<Value>,
    /// Cancels its generation, if it runs in the background.
    pub(crate) cancel: Option<CancellationToken>,
}

impl StoredResponse {
    pub(crate) fn status(&self) -> &str {
        self.response.get("status").and_then(Value::as_str).unwrap_or_default()
    }

    /// Its output items.
    pub(crate) fn output(&self) -> &[Value] {
        self.response.get("output").and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    fn bytes(&self) -> usize {
        self.response.to_string().len()
            + self.history.iter().map(|item| item.to_string().len()).sum::<usize>()
    }
}

#[derive(Debug, Default)]
struct StoredResponses {
    by_id: HashMap<String, (usize, StoredResponse)>,
    /// Ids, oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

/// Stored responses by id. The oldest are evicted.
#[derive(Debug, Default)]
pub(crate) struct ResponseStore(Mutex<StoredResponses>);

impl ResponseStore {
    /// Inserts or replaces a response. One that was cancelled stays as it is.
    pub(crate) fn insert(&self, id: &str, stored: StoredResponse) {
        let bytes = stored.bytes();
        let mut all = self.0.lock();
        if all.by_id.get(id).is_some_and(|(_, stored)| stored.status() == "cancelled") {
            return;
        }
        match all.by_id.insert(id.to_owned(), (bytes, stored)) {
            Some((replaced, _)) => all.bytes -= replaced,
            None => all.order.push_back(id.to_owned()),
        }
        all.bytes += bytes;
        while all.order.len() > MAX_RESPONSES || (all.bytes > MAX_BYTES && all.order.len() > 1) {
            let Some(oldest) = all.order.pop_front() else { break };
            if let Some((bytes, _)) = all.by_id.remove(&oldest) {
                all.bytes -= bytes;
            }
        }
    }

    pub(crate) fn get(&self, id: &str) -> Option<StoredResponse> {
        self.0.lock().by_id.get(id).map(|(_, stored)| stored.clone())
    }

    /// Changes the status of a response and returns it.
    pub(crate) fn set_status(&self, id: &str, status: &str) -> Option<Value> {
        let mut all = self.0.lock();
        let (_, stored) = all.by_id.get_mut(id)?;
        if stored.status() != "cancelled" {
            stored.response["status"] = json!(status);
        }
        Some(stored.response.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(status: &str) -> StoredResponse {
        StoredResponse { response: json!({"status": status}), history: Vec::new(), cancel: None }
    }

    #[test]
    fn oldest_responses_are_evicted() {
        let store = ResponseStore::default();
        for number in 0..=MAX_RESPONSES {
            store.insert(&format!("resp_{number}"), stored("completed"));
        }
        assert!(store.get("resp_0").is_none());
        assert!(store.get("resp_1").is_some());
        assert_eq!(store.0.lock().bytes, MAX_RESPONSES * stored("completed").bytes());
    }

    #[test]
    fn cancelled_response_stays_cancelled() {
        let store = ResponseStore::default();
        store.insert("resp_1", stored("queued"));
        assert_eq!(store.set_status("resp_1", "cancelled"), Some(json!({"status": "cancelled"})));
        store.insert("resp_1", stored("completed"));
        assert_eq!(store.set_status("resp_1", "failed"), Some(json!({"status": "cancelled"})));
        assert_eq!(store.set_status("resp_2", "failed"), None);
    }
}
