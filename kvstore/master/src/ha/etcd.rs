//! etcd as the coordinator, over its JSON gateway (`/v3/…`, on the same port as gRPC).
//!
//! Keys, those of Mooncake's master first:
//!
//! - `mooncake-store/CLUSTER/master_view`: the leader's RPC address, attached to its lease. The create revision is the term.
//! - `mooncake-store/CLUSTER/moongate/replication`: the address of the leader's replication port, attached to the same lease.
//! - `mooncake-store/CLUSTER/moongate/in_sync`: the in-sync set, without a lease.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Deserialize;
use serde_json::{Value, json};

use super::coordinator::{
    Candidacy, CoordinationError, ElectedLeader, ElectionView, EtcdError, EtcdRequestError, HaCoordinator,
    InSyncUpdateOutcome, LeaderTerm,
};
use super::member::{InSyncSet, read_in_sync, write_in_sync};
use super::tls::{TlsFiles, client};

/// Maximum size of a response in bytes.
const MAX_RESPONSE: usize = 1 << 20;

/// HTTP client of an etcd cluster.
#[derive(Debug)]
pub struct EtcdCoordinator {
    http: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// Timeout of a request to one endpoint.
    request_timeout: Duration,
    /// URLs without a trailing slash.
    endpoints: Vec<String>,
    /// Index of the endpoint that the next request goes to first.
    current: AtomicUsize,
    view: String,
    replication: String,
    in_sync: String,
}

/// A key in a response. etcd's JSON omits zero values and writes 64-bit numbers as strings.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EtcdTxnKeyValue {
    value: String,
    create_revision: String,
    mod_revision: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EtcdTxnRange {
    kvs: Vec<EtcdTxnKeyValue>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EtcdResponseOp {
    response_range: EtcdTxnRange,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EtcdResponseHeader {
    revision: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EtcdTxnResponse {
    header: EtcdResponseHeader,
    succeeded: bool,
    responses: Vec<EtcdResponseOp>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EtcdLeaseResponse {
    #[serde(rename = "ID")]
    id: String,
    #[serde(rename = "TTL")]
    ttl: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EtcdKeepAliveResponse {
    result: EtcdLeaseResponse,
}

fn number(text: &str) -> Result<i64, EtcdError> {
    if text.is_empty() { Ok(0) } else { text.parse().map_err(|_| EtcdError::Number(text.to_owned())) }
}

fn range(key: &str) -> Value {
    json!({ "request_range": { "key": STANDARD.encode(key) } })
}

fn put(key: &str, value: &str, lease: i64) -> Value {
    json!({ "request_put": {
        "key": STANDARD.encode(key), "value": STANDARD.encode(value), "lease": lease.to_string(),
    } })
}

/// Compares the key's create revision; 0 means that the key does not exist.
fn created(key: &str, revision: i64) -> Value {
    json!({ "key": STANDARD.encode(key), "target": "CREATE", "result": "EQUAL", "create_revision": revision.to_string() })
}

fn modified(key: &str, revision: i64) -> Value {
    json!({ "key": STANDARD.encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() })
}

impl EtcdTxnKeyValue {
    fn text(&self) -> Result<String, EtcdError> {
        let bytes = STANDARD.decode(&self.value).map_err(|_| EtcdError::Base64)?;
        String::from_utf8(bytes).map_err(|_| EtcdError::NotUtf8)
    }
}

impl EtcdTxnResponse {
    fn key_value(&self, index: usize) -> Option<&EtcdTxnKeyValue> {
        self.responses.get(index)?.response_range.kvs.first()
    }

    fn revision(&self) -> Result<i64, EtcdError> {
        number(&self.header.revision)
    }

    /// Parses the response to [`HaCoordinator::observe`]: the leader, the replication address and the in-sync set, in this order.
    fn view(&self, in_sync_key: &str) -> Result<ElectionView, EtcdError> {
        let leader = match self.key_value(0) {
            Some(view) => {
                let replication = self.key_value(1).map(EtcdTxnKeyValue::text).transpose()?;
                let term = number(&view.create_revision)?;
                Some(ElectedLeader { address: view.text()?, replication, term })
            }
            None => None,
        };
        let in_sync = match self.key_value(2) {
            Some(stored) => {
                let members = read_in_sync(&stored.text()?)
                    .ok_or_else(|| EtcdError::InSyncFormat { key: in_sync_key.to_owned() })?;
                Some((members, number(&stored.mod_revision)?))
            }
            None => None,
        };
        Ok(ElectionView { leader, in_sync })
    }
}

/// Parses etcd's response to [`HaCoordinator::observe`]: for fuzzing.
///
/// # Errors
/// [`EtcdError`] if the bytes are no such response.
pub fn read_view(response: &[u8]) -> Result<ElectionView, EtcdError> {
    let txn: EtcdTxnResponse = parse("etcd", response)?;
    txn.view("in_sync")
}

fn parse<'a, T: Deserialize<'a>>(endpoint: &str, response: &'a [u8]) -> Result<T, EtcdError> {
    serde_json::from_slice(response)
        .map_err(|source| EtcdError::Malformed { endpoint: endpoint.to_owned(), source })
}

impl EtcdCoordinator {
    /// A client of the cluster at `endpoints`: `HOST:PORT`, separated by `;` or `,`, each with an optional `http://` prefix, or
    /// `https://` if `tls` is set. An endpoint that does not respond within `request_timeout` is skipped for the next one.
    ///
    /// # Errors
    /// No endpoint, an invalid endpoint, or unusable TLS files.
    pub fn new(
        endpoints: &str,
        cluster: &str,
        tls: Option<&TlsFiles>,
        request_timeout: Duration,
    ) -> Result<Self, EtcdError> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = |text: &str| {
            let url = if text.contains("://") { text.to_owned() } else { format!("{scheme}://{text}") };
            match url.parse::<Uri>() {
                Ok(parsed) if parsed.host().is_some() && parsed.scheme_str() == Some(scheme) => {
                    Ok(url.trim_end_matches('/').to_owned())
                }
                _ => Err(EtcdError::InvalidEndpoint(text.to_owned())),
            }
        };
        let texts = endpoints.split([';', ',']).map(str::trim).filter(|text| !text.is_empty());
        let endpoints: Vec<String> = texts.map(url).collect::<Result<_, _>>()?;
        if endpoints.is_empty() {
            return Err(EtcdError::NoEndpoint);
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(client(tls)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let http = Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
        let key = |name: &str| format!("mooncake-store/{cluster}/{name}");
        Ok(Self {
            http,
            request_timeout,
            endpoints,
            current: AtomicUsize::new(0),
            view: key("master_view"),
            replication: key("moongate/replication"),
            in_sync: key("moongate/in_sync"),
        })
    }

    /// Sends a request to one endpoint after the other, starting with the one that responded last.
    async fn request<T: for<'a> Deserialize<'a>>(
        &self,
        path: &str,
        request_body: &Value,
    ) -> Result<T, EtcdError> {
        let first = self.current.load(Relaxed);
        let mut last_error = EtcdError::NoEndpoint;
        for attempt in 0..self.endpoints.len() {
            let index = (first + attempt) % self.endpoints.len();
            let Some(endpoint) = self.endpoints.get(index) else { continue };
            // Advanced before the response: if the caller's timeout cancels this request, the next one goes to another endpoint.
            self.current.store((index + 1) % self.endpoints.len(), Relaxed);
            match self.request_at(endpoint, path, request_body).await {
                Ok(response) => {
                    self.current.store(index, Relaxed);
                    return parse(endpoint, &response);
                }
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    async fn request_at(&self, endpoint: &str, path: &str, request_body: &Value) -> Result<Bytes, EtcdError> {
        let exchange = self.exchange(endpoint, path, request_body);
        let exchanged = tokio::time::timeout(self.request_timeout, exchange).await;
        let (status, response) = exchanged
            .unwrap_or(Err(EtcdRequestError::TimedOut))
            .map_err(|source| EtcdError::Request { endpoint: endpoint.to_owned(), source })?;
        if !status.is_success() {
            let excerpt = String::from_utf8_lossy(&response).chars().take(200).collect();
            return Err(EtcdError::Status { endpoint: endpoint.to_owned(), status, excerpt });
        }
        Ok(response)
    }

    async fn exchange(
        &self,
        endpoint: &str,
        path: &str,
        request_body: &Value,
    ) -> Result<(StatusCode, Bytes), EtcdRequestError> {
        let body = Bytes::from(request_body.to_string());
        let request = Request::post(format!("{endpoint}{path}")).header(CONTENT_TYPE, "application/json");
        let response = self.http.request(request.body(Full::new(body))?).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_RESPONSE).collect().await;
        Ok((status, body.map_err(EtcdRequestError::Body)?.to_bytes()))
    }

    async fn transact(
        &self,
        compare: &[Value],
        success: &[Value],
        failure: &[Value],
    ) -> Result<EtcdTxnResponse, EtcdError> {
        let request_body = json!({ "compare": compare, "success": success, "failure": failure });
        self.request("/v3/kv/txn", &request_body).await
    }

    async fn revoke(&self, lease: i64) -> Result<(), EtcdError> {
        let _: Value = self.request("/v3/lease/revoke", &json!({ "ID": lease.to_string() })).await?;
        Ok(())
    }
}

#[async_trait]
impl HaCoordinator for EtcdCoordinator {
    async fn observe(&self) -> Result<ElectionView, CoordinationError> {
        let keys = [&self.view, &self.replication, &self.in_sync].map(|key| range(key));
        let txn = self.transact(&[], &keys, &[]).await?;
        Ok(txn.view(&self.in_sync)?)
    }

    async fn campaign(&self, candidacy: &Candidacy) -> Result<Option<LeaderTerm>, CoordinationError> {
        let seconds = candidacy.lease.as_secs_f64().ceil().max(1.0) as u64;
        let granted: EtcdLeaseResponse =
            self.request("/v3/lease/grant", &json!({ "TTL": seconds.to_string() })).await?;
        let lease = number(&granted.id)?;
        let alone = write_in_sync(&InSyncSet::from([candidacy.member.clone()]));
        let compare = [created(&self.view, 0), modified(&self.in_sync, candidacy.revision)];
        let success = [
            put(&self.view, &candidacy.member.address, lease),
            put(&self.replication, &candidacy.replication, lease),
            put(&self.in_sync, &alone, 0),
        ];
        let txn = self.transact(&compare, &success, &[]).await?;
        if txn.succeeded {
            return Ok(Some(LeaderTerm { term: txn.revision()?, lease }));
        }
        // An unused lease would expire anyway.
        let _ = self.revoke(lease).await;
        Ok(None)
    }

    async fn renew(&self, leader_term: LeaderTerm) -> Result<bool, CoordinationError> {
        let renewed: EtcdKeepAliveResponse =
            self.request("/v3/lease/keepalive", &json!({ "ID": leader_term.lease.to_string() })).await?;
        if number(&renewed.result.ttl)? <= 0 {
            return Ok(false);
        }
        // An administrator may have deleted the key.
        let txn = self.transact(&[created(&self.view, leader_term.term)], &[], &[]).await?;
        Ok(txn.succeeded)
    }

    async fn update_in_sync(
        &self,
        leader_term: LeaderTerm,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<InSyncUpdateOutcome, CoordinationError> {
        let compare = [created(&self.view, leader_term.term), modified(&self.in_sync, revision)];
        let success = [put(&self.in_sync, &write_in_sync(members), 0)];
        let txn = self.transact(&compare, &success, &[range(&self.view)]).await?;
        if txn.succeeded {
            return Ok(InSyncUpdateOutcome::Stored(txn.revision()?));
        }
        match txn.key_value(0) {
            Some(view) if number(&view.create_revision)? == leader_term.term => {
                Ok(InSyncUpdateOutcome::Conflict)
            }
            _ => Ok(InSyncUpdateOutcome::Deposed),
        }
    }

    async fn update_in_sync_without_leader(
        &self,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<bool, CoordinationError> {
        let compare = [created(&self.view, 0), modified(&self.in_sync, revision)];
        let success = [put(&self.in_sync, &write_in_sync(members), 0)];
        Ok(self.transact(&compare, &success, &[]).await?.succeeded)
    }

    async fn resign(&self, leader_term: LeaderTerm) -> Result<(), CoordinationError> {
        // An error is ignored: the lease may be gone already, and without etcd it expires.
        let _ = self.revoke(leader_term.lease).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_parsed() {
        let request_timeout = Duration::from_secs(1);
        let etcd = EtcdCoordinator::new("a:1;http://b:2/, 127.0.0.1:3", "c", None, request_timeout).unwrap();
        assert_eq!(etcd.endpoints, ["http://a:1", "http://b:2", "http://127.0.0.1:3"]);
        assert_eq!(etcd.view, "mooncake-store/c/master_view");
        assert_eq!(
            etcd.view,
            moongate_master_client::rpc::leader_key("c"),
            "Moongate's clients read this key"
        );
        for wrong in ["", ";", "https://a:1", "redis://a:1", "a b"] {
            assert!(EtcdCoordinator::new(wrong, "c", None, request_timeout).is_err(), "{wrong}");
        }
    }

    #[test]
    fn omitted_json_members_are_zero() {
        let txn: EtcdTxnResponse = serde_json::from_str(
            r#"{"header":{"cluster_id":"1","revision":"7"},"responses":[{"response_range":{"header":{}}},
            {"response_range":{"kvs":[{"key":"YQ==","create_revision":"2","mod_revision":"3","value":"aG9zdDox"}]}}]}"#,
        )
        .unwrap();
        assert!(!txn.succeeded && txn.key_value(0).is_none() && txn.key_value(2).is_none());
        assert_eq!(txn.revision().unwrap(), 7);
        assert_eq!(txn.key_value(1).unwrap().text().unwrap(), "host:1");
        assert!(number("x").is_err());
    }
}
