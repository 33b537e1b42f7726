//! Looks up in etcd at which address the leader of several masters serves RPCs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::StatusCode;
use reqwest::header::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::json;

use crate::admin::HttpRequestError;

/// Maximum size of a response of etcd in bytes.
const MAX_RESPONSE: usize = 64 << 10;
/// Maximum length of a leader's address in bytes.
const MAX_LEADER: usize = 512;
/// Characters of an error response that go into the message.
const MAX_SHOWN: usize = 200;

/// The key in etcd under which the masters of a cluster publish their leader's RPC address.
#[must_use]
pub fn leader_key(cluster: &str) -> String {
    format!("mooncake-store/{cluster}/master_view")
}

/// Why the leader of masters with etcd cannot be looked up.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LeaderLookupError {
    #[error("{0}")]
    Client(HttpRequestError),
    /// No endpoint of etcd responded as expected.
    #[error("{}", .0.iter().map(EtcdEndpointError::to_string).collect::<Vec<_>>().join("; "))]
    NoEndpoint(Vec<EtcdEndpointError>),
    /// The response has no leader's address.
    #[error("etcd at {endpoint}, key {key}: {source}")]
    NoAddress {
        /// `HOST:PORT` of the endpoint that responded.
        endpoint: String,
        key: String,
        source: LeaderRecordError,
    },
}

/// Why an endpoint of etcd did not respond as expected.
#[derive(Clone, Debug, thiserror::Error)]
#[error("etcd at {endpoint}: {source}")]
pub struct EtcdEndpointError {
    /// `HOST:PORT` of the endpoint.
    endpoint: String,
    source: EtcdRangeError,
}

/// Why a key was not read from etcd.
#[derive(Clone, Debug, thiserror::Error)]
enum EtcdRangeError {
    #[error(transparent)]
    Http(#[from] HttpRequestError),
    #[error("the response exceeds {MAX_RESPONSE} bytes")]
    TooLarge,
    /// Any status except success, with the start of the body.
    #[error("{0}: {1}")]
    Status(StatusCode, String),
}

/// Why etcd's value is no leader's address.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LeaderRecordError {
    /// The response is not JSON of etcd.
    #[error("{0}")]
    Malformed(#[source] Arc<serde_json::Error>),
    #[error("no master is the leader at present")]
    NoLeader,
    #[error("its value is not HOST:PORT")]
    NotAddress,
}

/// A read-only client of etcd's JSON interface.
#[derive(Debug)]
pub(super) struct EtcdLeaderLookup {
    http: reqwest::Client,
    endpoints: Vec<String>,
    /// Index of the endpoint that responded last.
    current: AtomicUsize,
    key: String,
}

#[derive(Deserialize)]
struct LeaderRangeResponse {
    /// Absent if the key does not exist.
    #[serde(default)]
    kvs: Vec<LeaderKeyValue>,
}

#[derive(Deserialize)]
struct LeaderKeyValue {
    /// Base64-encoded value of the key.
    #[serde(default)]
    value: String,
}

impl EtcdLeaderLookup {
    /// A lookup in the etcd with these endpoints, each of which has `time_limit` to respond.
    pub(super) fn new(
        endpoints: Vec<String>,
        cluster: &str,
        time_limit: Duration,
    ) -> Result<Self, LeaderLookupError> {
        let http = moongate_runtime::plain_http_client()
            .connect_timeout(time_limit)
            .timeout(time_limit)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| LeaderLookupError::Client(error.into()))?;
        Ok(Self { http, endpoints, current: AtomicUsize::new(0), key: leader_key(cluster) })
    }

    /// The leader's address, from the first endpoint that responds. Starts with the one that responded last.
    pub(super) async fn leader(&self) -> Result<String, LeaderLookupError> {
        let first = self.current.load(Relaxed);
        let mut failures = Vec::new();
        for attempt in 0..self.endpoints.len() {
            let index = (first + attempt) % self.endpoints.len();
            let Some(endpoint) = self.endpoints.get(index) else { continue };
            // Advanced before the response: if this lookup is cancelled, the next one starts with the next endpoint.
            self.current.store((index + 1) % self.endpoints.len(), Relaxed);
            match self.range(endpoint).await {
                Ok(response) => {
                    self.current.store(index, Relaxed);
                    return leader_address(&response).map_err(|source| LeaderLookupError::NoAddress {
                        endpoint: endpoint.clone(),
                        key: self.key.clone(),
                        source,
                    });
                }
                Err(source) => failures.push(EtcdEndpointError { endpoint: endpoint.clone(), source }),
            }
        }
        Err(LeaderLookupError::NoEndpoint(failures))
    }

    async fn range(&self, endpoint: &str) -> Result<Vec<u8>, EtcdRangeError> {
        let body = json!({ "key": STANDARD.encode(&self.key) }).to_string();
        let request = self.http.post(format!("http://{endpoint}/v3/kv/range"));
        let request = request.header(CONTENT_TYPE, "application/json").body(body);
        let mut response = request.send().await.map_err(HttpRequestError::from)?;
        let (status, mut body) = (response.status(), Vec::new());
        while let Some(chunk) = response.chunk().await.map_err(HttpRequestError::from)? {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_RESPONSE {
                return Err(EtcdRangeError::TooLarge);
            }
        }
        if !status.is_success() {
            let shown = String::from_utf8_lossy(&body).chars().take(MAX_SHOWN).collect();
            return Err(EtcdRangeError::Status(status, shown));
        }
        Ok(body)
    }
}

/// The leader's address in etcd's response.
fn leader_address(response: &[u8]) -> Result<String, LeaderRecordError> {
    let range: LeaderRangeResponse =
        serde_json::from_slice(response).map_err(|error| LeaderRecordError::Malformed(Arc::new(error)))?;
    let entry = range.kvs.first().ok_or(LeaderRecordError::NoLeader)?;
    let leader = STANDARD.decode(&entry.value).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let is_address = |leader: &String| leader.len() <= MAX_LEADER && leader.contains(':');
    leader.filter(is_address).ok_or(LeaderRecordError::NotAddress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcd_responses_are_parsed() {
        let leader = leader_address(br#"{"header":{},"kvs":[{"key":"YQ==","value":"aG9zdDox"}]}"#);
        assert_eq!(leader.unwrap(), "host:1");
        for (response, reason) in [
            (r#"{"header":{}}"#, "no master is the leader at present"),
            (r#"{"kvs":[{"value":"aG9zdA=="}]}"#, "not HOST:PORT"),
            (r#"{"kvs":[{"value":"*"}]}"#, "not HOST:PORT"),
            ("<html>", "expected value"),
        ] {
            let error = leader_address(response.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
