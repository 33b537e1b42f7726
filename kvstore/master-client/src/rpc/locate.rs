//! Finds a master: at a fixed address, or at the address that the leader of several masters registered in etcd.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::CONTENT_TYPE;
use serde::Deserialize;
use serde_json::json;

use super::error::RpcError;
use crate::admin::root_cause;

/// Environment variable with the cluster's name, as in Mooncake's clients.
pub const CLUSTER_VARIABLE: &str = "MC_STORE_CLUSTER_ID";
/// Default name of the cluster, equal to the masters' default.
const DEFAULT_CLUSTER: &str = "mooncake_cluster";
/// Scheme of the addresses of masters that publish their leader in etcd.
const ETCD: &str = "etcd://";
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

/// An invalid address of a master.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{address}` is not a master's address: {reason}")]
pub struct MasterAddressError {
    pub address: String,
    pub reason: &'static str,
}

/// A parsed address of a master. Its text form is the argument of [`MasterClient::new`](super::MasterClient::new).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MasterAddress {
    /// `HOST:PORT` of a single master.
    Fixed(String),
    /// `etcd://HOST:PORT;HOST:PORT`, with `;` or `,` between endpoints and optionally `/CLUSTER` at the end.
    Etcd {
        /// `HOST:PORT` of each etcd node.
        endpoints: Vec<String>,
        /// Name of the masters' cluster.
        cluster: String,
    },
}

impl MasterAddress {
    /// Parses an address. `cluster` selects the masters if several clusters share an etcd, unless the address contains a cluster.
    ///
    /// # Errors
    /// When the scheme is unknown, or there is no etcd endpoint.
    pub fn parse(address: &str, cluster: Option<&str>) -> Result<Self, MasterAddressError> {
        let address = address.trim();
        let invalid = |reason| MasterAddressError { address: address.to_owned(), reason };
        let Some(rest) = address.strip_prefix(ETCD) else {
            if address.contains("://") {
                return Err(invalid("write HOST:PORT, or etcd://HOST:PORT;HOST:PORT for masters with etcd"));
            }
            return Ok(Self::Fixed(address.to_owned()));
        };
        let (endpoints, named) = rest.split_once('/').unwrap_or((rest, ""));
        let named = Some(named.trim_matches('/')).filter(|name| !name.is_empty());
        let cluster = named.or(cluster.filter(|name| !name.is_empty())).unwrap_or(DEFAULT_CLUSTER);
        let endpoints = endpoints.split([';', ',']).map(str::trim).filter(|endpoint| !endpoint.is_empty());
        let endpoints: Vec<String> = endpoints.map(str::to_owned).collect();
        let is_endpoint = |endpoint: &String| {
            let has_port = endpoint.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
            let url = reqwest::Url::parse(&format!("http://{endpoint}"));
            has_port && url.is_ok_and(|url| url.has_host() && url.path() == "/")
        };
        if endpoints.is_empty() || !endpoints.iter().all(is_endpoint) {
            return Err(invalid("write etcd://HOST:PORT, with ; between several etcd nodes"));
        }
        Ok(Self::Etcd { endpoints, cluster: cluster.to_owned() })
    }
}

impl fmt::Display for MasterAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(address) => out.write_str(address),
            Self::Etcd { endpoints, cluster } => write!(out, "{ETCD}{}/{cluster}", endpoints.join(";")),
        }
    }
}

/// Finds the master's `HOST:PORT` before each connection.
#[derive(Debug)]
pub struct MasterLocator {
    address: Arc<str>,
    source: Result<AddressSource, String>,
}

#[derive(Debug)]
enum AddressSource {
    Fixed,
    Etcd(EtcdLeaderLookup),
}

/// A read-only client of etcd's JSON interface.
#[derive(Debug)]
struct EtcdLeaderLookup {
    http: reqwest::Client,
    endpoints: Vec<String>,
    /// Index of the endpoint that responded last.
    current: AtomicUsize,
    key: String,
}

impl MasterLocator {
    /// A locator of the master at `address`. Each etcd endpoint has `time_limit` to respond.
    #[must_use]
    pub fn new(address: &str, time_limit: Duration) -> Self {
        let source = MasterAddress::parse(address, None)
            .map_err(|error| error.reason.to_owned())
            .and_then(|parsed| AddressSource::new(parsed, time_limit));
        Self { address: address.into(), source }
    }

    /// The address as configured.
    pub(super) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// The master's current `HOST:PORT`.
    ///
    /// # Errors
    /// [`RpcError::Unreachable`] when etcd cannot be reached or has no leader.
    pub async fn locate(&self) -> Result<Arc<str>, RpcError> {
        let entry = match &self.source {
            Ok(AddressSource::Fixed) => Ok(Arc::clone(&self.address)),
            Ok(AddressSource::Etcd(lookup)) => lookup.leader().await.map(Arc::from),
            Err(reason) => Err(reason.clone()),
        };
        entry.map_err(|reason| RpcError::Unreachable { address: Arc::clone(&self.address), reason })
    }
}

impl AddressSource {
    fn new(address: MasterAddress, time_limit: Duration) -> Result<Self, String> {
        let MasterAddress::Etcd { endpoints, cluster } = address else { return Ok(Self::Fixed) };
        let http = moongate_runtime::plain_http_client()
            .connect_timeout(time_limit)
            .timeout(time_limit)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| error.to_string())?;
        let current = AtomicUsize::new(0);
        Ok(Self::Etcd(EtcdLeaderLookup { http, endpoints, current, key: leader_key(&cluster) }))
    }
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
    /// The leader's address, from the first endpoint that responds. Starts with the one that responded last.
    async fn leader(&self) -> Result<String, String> {
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
                    return self.read(endpoint, &response);
                }
                Err(reason) => failures.push(format!("etcd at {endpoint}: {reason}")),
            }
        }
        Err(failures.join("; "))
    }

    async fn range(&self, endpoint: &str) -> Result<Vec<u8>, String> {
        let body = json!({ "key": STANDARD.encode(&self.key) }).to_string();
        let request = self.http.post(format!("http://{endpoint}/v3/kv/range"));
        let request = request.header(CONTENT_TYPE, "application/json").body(body);
        let mut response = request.send().await.map_err(|error| root_cause(&error))?;
        let (status, mut body) = (response.status(), Vec::new());
        while let Some(chunk) = response.chunk().await.map_err(|error| root_cause(&error))? {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_RESPONSE {
                return Err(format!("the response exceeds {MAX_RESPONSE} bytes"));
            }
        }
        if !status.is_success() {
            let shown: String = String::from_utf8_lossy(&body).chars().take(MAX_SHOWN).collect();
            return Err(format!("{status}: {shown}"));
        }
        Ok(body)
    }

    fn read(&self, endpoint: &str, response: &[u8]) -> Result<String, String> {
        let unusable = |reason: String| format!("etcd at {endpoint}, key {}: {reason}", self.key);
        let range: LeaderRangeResponse =
            serde_json::from_slice(response).map_err(|error| unusable(error.to_string()))?;
        let Some(entry) = range.kvs.first() else {
            return Err(unusable("no master is the leader at present".to_owned()));
        };
        let leader = STANDARD.decode(&entry.value).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let is_address = |leader: &String| leader.len() <= MAX_LEADER && leader.contains(':');
        leader.filter(is_address).ok_or_else(|| unusable("its value is not HOST:PORT".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_formatted() {
        let read = |address: &str, cluster| MasterAddress::parse(address, cluster).map(|it| it.to_string());
        assert_eq!(read(" m:50051 ", Some("c")).unwrap(), "m:50051");
        let two = "etcd://a:2379, [::1]:2379";
        assert_eq!(read(two, None).unwrap(), "etcd://a:2379;[::1]:2379/mooncake_cluster");
        assert_eq!(read(two, Some("")).unwrap(), "etcd://a:2379;[::1]:2379/mooncake_cluster");
        assert_eq!(read(two, Some("blue")).unwrap(), "etcd://a:2379;[::1]:2379/blue");
        assert_eq!(read("etcd://a:2379/red/", Some("blue")).unwrap(), "etcd://a:2379/red");
        for invalid in ["etcd://", "etcd://;", "etcd://a", "etcd://a:b", "etcd://http://a:1", "redis://a:1"] {
            assert!(read(invalid, None).is_err(), "{invalid}");
        }
    }

    #[test]
    fn etcd_responses_are_parsed() {
        let address = MasterAddress::parse("etcd://a:1", None).unwrap();
        let AddressSource::Etcd(lookup) = AddressSource::new(address, Duration::from_secs(1)).unwrap() else {
            unreachable!()
        };
        let leader = lookup.read("a:1", br#"{"header":{},"kvs":[{"key":"YQ==","value":"aG9zdDox"}]}"#);
        assert_eq!(leader.unwrap(), "host:1");
        for (response, reason) in [
            (r#"{"header":{}}"#, "no master is the leader at present"),
            (r#"{"kvs":[{"value":"aG9zdA=="}]}"#, "not HOST:PORT"),
            (r#"{"kvs":[{"value":"*"}]}"#, "not HOST:PORT"),
            ("<html>", "expected value"),
        ] {
            let error = lookup.read("a:1", response.as_bytes()).unwrap_err();
            assert!(
                error.contains(reason) && error.contains("mooncake-store/mooncake_cluster/master_view"),
                "{error}"
            );
        }
    }
}
