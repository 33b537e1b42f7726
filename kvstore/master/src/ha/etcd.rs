//! etcd as the store that masters decide with, over its JSON interface (`/v3/…`, on the same port as gRPC).
//!
//! Keys, those of Mooncake's master first:
//!
//! - `mooncake-store/CLUSTER/master_view`: the leader's RPC address, for as long as its lease lives. Its create revision is the term.
//! - `mooncake-store/CLUSTER/moongate/replication`: where the leader serves its followers, under the same lease.
//! - `mooncake-store/CLUSTER/moongate/in_sync`: who may lead next; it stays.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Request, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Deserialize;
use serde_json::{Value, json};

use super::coordinator::{
    Candidacy, CoordinationError, ElectedLeader, ElectionView, HaCoordinator, InSyncUpdateOutcome, LeaderTerm,
};
use super::member::{InSyncSet, read_in_sync, write_in_sync};
use super::tls::{TlsFiles, client};

/// The longest answer that is read.
const MAX_RESPONSE: usize = 1 << 20;

/// A client of an etcd cluster.
#[derive(Debug)]
pub struct EtcdCoordinator {
    http: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// How long one endpoint's answer is waited for.
    request_timeout: Duration,
    /// URLs without a slash at the end.
    endpoints: Vec<String>,
    /// The one that answered last.
    current: AtomicUsize,
    view: String,
    replication: String,
    in_sync: String,
}

/// A key in an answer. etcd leaves out what is zero, and writes numbers as text.
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

fn failed(why: impl ToString) -> CoordinationError {
    CoordinationError(why.to_string())
}

/// An error with its causes: what hyper says alone is nothing to go by.
fn chain(error: &dyn Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn number(text: &str) -> Result<i64, CoordinationError> {
    if text.is_empty() {
        Ok(0)
    } else {
        text.parse().map_err(|_| failed(format!("etcd sent the number `{text}`")))
    }
}

fn range(key: &str) -> Value {
    json!({ "request_range": { "key": STANDARD.encode(key) } })
}

fn put(key: &str, value: &str, lease: i64) -> Value {
    json!({ "request_put": {
        "key": STANDARD.encode(key), "value": STANDARD.encode(value), "lease": lease.to_string(),
    } })
}

/// The key was made at this revision; 0 if it must not be there.
fn created(key: &str, revision: i64) -> Value {
    json!({ "key": STANDARD.encode(key), "target": "CREATE", "result": "EQUAL", "create_revision": revision.to_string() })
}

fn modified(key: &str, revision: i64) -> Value {
    json!({ "key": STANDARD.encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() })
}

impl EtcdTxnKeyValue {
    fn text(&self) -> Result<String, CoordinationError> {
        let bytes =
            STANDARD.decode(&self.value).map_err(|_| failed("etcd sent something else than base64"))?;
        String::from_utf8(bytes).map_err(|_| failed("a key in etcd has something else than text"))
    }
}

impl EtcdTxnResponse {
    fn key_value(&self, at: usize) -> Option<&EtcdTxnKeyValue> {
        self.responses.get(at)?.response_range.kvs.first()
    }

    fn revision(&self) -> Result<i64, CoordinationError> {
        number(&self.header.revision)
    }

    /// The answer to a look at the view, the replication address and the in-sync set, in this order.
    fn view(&self, in_sync_key: &str) -> Result<ElectionView, CoordinationError> {
        let leader = self.key_value(0).map(|view| {
            let replication = self.key_value(1).map(EtcdTxnKeyValue::text).transpose()?;
            Ok(ElectedLeader { address: view.text()?, replication, term: number(&view.create_revision)? })
        });
        let in_sync = self.key_value(2).map(|found| {
            let members = read_in_sync(&found.text()?)
                .ok_or_else(|| failed(format!("{in_sync_key} in etcd has an unknown form")))?;
            Ok((members, number(&found.mod_revision)?))
        });
        Ok(ElectionView { leader: leader.transpose()?, in_sync: in_sync.transpose()? })
    }
}

/// Reads etcd's answer to a look at who leads: for fuzzing.
///
/// # Errors
/// [`CoordinationError`] if etcd does not send such an answer.
pub fn read_view(answer: &[u8]) -> Result<ElectionView, CoordinationError> {
    let done: EtcdTxnResponse = serde_json::from_slice(answer).map_err(failed)?;
    done.view("in_sync")
}

impl EtcdCoordinator {
    /// A client of the cluster at `endpoints`: `HOST:PORT`, several with `;` or `,` between them, each maybe with `http://` before
    /// it, or with `https://` where there is `tls`. One endpoint that does not answer within `patience` is left for the next.
    ///
    /// # Errors
    /// When there is no endpoint, or something that is none, or when the files for TLS cannot be used.
    pub fn new(
        endpoints: &str,
        cluster: &str,
        tls: Option<&TlsFiles>,
        patience: Duration,
    ) -> Result<Self, CoordinationError> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = |text: &str| {
            let url = if text.contains("://") { text.to_owned() } else { format!("{scheme}://{text}") };
            match url.parse::<Uri>() {
                Ok(parsed) if parsed.host().is_some() && parsed.scheme_str() == Some(scheme) => {
                    Ok(url.trim_end_matches('/').to_owned())
                }
                _ => Err(failed(format!(
                    "`{text}` is no endpoint of etcd; it is written HOST:PORT, and https:// needs --etcd_ca"
                ))),
            }
        };
        let texts = endpoints.split([';', ',']).map(str::trim).filter(|text| !text.is_empty());
        let endpoints: Vec<String> = texts.map(url).collect::<Result<_, _>>()?;
        if endpoints.is_empty() {
            return Err(failed("no endpoint of etcd is given"));
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(client(tls).map_err(failed)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let http = Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
        let key = |name: &str| format!("mooncake-store/{cluster}/{name}");
        Ok(Self {
            http,
            request_timeout: patience,
            endpoints,
            current: AtomicUsize::new(0),
            view: key("master_view"),
            replication: key("moongate/replication"),
            in_sync: key("moongate/in_sync"),
        })
    }

    /// Asks one endpoint after the other, beginning with the one that answered last.
    async fn request<T: for<'a> Deserialize<'a>>(
        &self,
        path: &str,
        question: &Value,
    ) -> Result<T, CoordinationError> {
        let begin = self.current.load(Relaxed);
        let mut why = failed("etcd was not asked");
        for turn in 0..self.endpoints.len() {
            let at = (begin + turn) % self.endpoints.len();
            let Some(endpoint) = self.endpoints.get(at) else { continue };
            // Moved on before it answers: whoever gives up on this answer asks another next time.
            self.current.store((at + 1) % self.endpoints.len(), Relaxed);
            match self.request_at(endpoint, path, question).await {
                Ok(answer) => {
                    self.current.store(at, Relaxed);
                    return serde_json::from_slice(&answer).map_err(|error| {
                        failed(format!("{endpoint} sent what etcd does not send: {error}"))
                    });
                }
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    async fn request_at(
        &self,
        endpoint: &str,
        path: &str,
        question: &Value,
    ) -> Result<Bytes, CoordinationError> {
        let problem = |error: &dyn Error| failed(format!("etcd at {endpoint}: {}", chain(error)));
        let body = Bytes::from(question.to_string());
        let request = Request::post(format!("{endpoint}{path}")).header(CONTENT_TYPE, "application/json");
        let request = request.body(Full::new(body)).map_err(|error| problem(&error))?;
        let asked = async {
            let response = self.http.request(request).await.map_err(|error| problem(&error))?;
            let status = response.status();
            let answer = Limited::new(response.into_body(), MAX_RESPONSE).collect().await;
            Ok((status, answer.map_err(|error| problem(&*error))?.to_bytes()))
        };
        let answered = tokio::time::timeout(self.request_timeout, asked).await;
        let (status, answer) =
            answered.map_err(|_| failed(format!("etcd at {endpoint} does not answer in time")))??;
        if !status.is_success() {
            let said: String = String::from_utf8_lossy(&answer).chars().take(200).collect();
            return Err(failed(format!("etcd at {endpoint} says {status}: {said}")));
        }
        Ok(answer)
    }

    async fn transact(
        &self,
        compare: &[Value],
        success: &[Value],
        failure: &[Value],
    ) -> Result<EtcdTxnResponse, CoordinationError> {
        let question = json!({ "compare": compare, "success": success, "failure": failure });
        self.request("/v3/kv/txn", &question).await
    }

    async fn revoke(&self, lease: i64) -> Result<(), CoordinationError> {
        let _: Value = self.request("/v3/lease/revoke", &json!({ "ID": lease.to_string() })).await?;
        Ok(())
    }
}

#[async_trait]
impl HaCoordinator for EtcdCoordinator {
    async fn observe(&self) -> Result<ElectionView, CoordinationError> {
        let keys = [&self.view, &self.replication, &self.in_sync].map(|key| range(key));
        let done = self.transact(&[], &keys, &[]).await?;
        done.view(&self.in_sync)
    }

    async fn campaign(&self, bid: &Candidacy) -> Result<Option<LeaderTerm>, CoordinationError> {
        let seconds = bid.lease.as_secs_f64().ceil().max(1.0) as u64;
        let granted: EtcdLeaseResponse =
            self.request("/v3/lease/grant", &json!({ "TTL": seconds.to_string() })).await?;
        let lease = number(&granted.id)?;
        let alone = write_in_sync(&InSyncSet::from([bid.member.clone()]));
        let compare = [created(&self.view, 0), modified(&self.in_sync, bid.revision)];
        let success = [
            put(&self.view, &bid.member.address, lease),
            put(&self.replication, &bid.replication, lease),
            put(&self.in_sync, &alone, 0),
        ];
        let done = self.transact(&compare, &success, &[]).await?;
        if done.succeeded {
            return Ok(Some(LeaderTerm { term: done.revision()?, lease }));
        }
        // It would end by itself, too.
        let _ = self.revoke(lease).await;
        Ok(None)
    }

    async fn renew(&self, tenure: LeaderTerm) -> Result<bool, CoordinationError> {
        let kept: EtcdKeepAliveResponse =
            self.request("/v3/lease/keepalive", &json!({ "ID": tenure.lease.to_string() })).await?;
        if number(&kept.result.ttl)? <= 0 {
            return Ok(false);
        }
        // Somebody may have removed the key by hand.
        let done = self.transact(&[created(&self.view, tenure.term)], &[], &[]).await?;
        Ok(done.succeeded)
    }

    async fn update_in_sync(
        &self,
        tenure: LeaderTerm,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<InSyncUpdateOutcome, CoordinationError> {
        let compare = [created(&self.view, tenure.term), modified(&self.in_sync, revision)];
        let success = [put(&self.in_sync, &write_in_sync(members), 0)];
        let done = self.transact(&compare, &success, &[range(&self.view)]).await?;
        if done.succeeded {
            return Ok(InSyncUpdateOutcome::Stored(done.revision()?));
        }
        match done.key_value(0) {
            Some(view) if number(&view.create_revision)? == tenure.term => Ok(InSyncUpdateOutcome::Conflict),
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

    async fn resign(&self, tenure: LeaderTerm) -> Result<(), CoordinationError> {
        // Where it is gone already etcd says so, and where etcd is gone it ends by itself.
        let _ = self.revoke(tenure.lease).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read() {
        let patience = Duration::from_secs(1);
        let etcd = EtcdCoordinator::new("a:1;http://b:2/, 127.0.0.1:3", "c", None, patience).unwrap();
        assert_eq!(etcd.endpoints, ["http://a:1", "http://b:2", "http://127.0.0.1:3"]);
        assert_eq!(etcd.view, "mooncake-store/c/master_view");
        assert_eq!(
            etcd.view,
            moongate_master_client::rpc::leader_key("c"),
            "clients of this project look there"
        );
        for wrong in ["", ";", "https://a:1", "redis://a:1", "a b"] {
            assert!(EtcdCoordinator::new(wrong, "c", None, patience).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_left_out_is_nothing() {
        let done: EtcdTxnResponse = serde_json::from_str(
            r#"{"header":{"cluster_id":"1","revision":"7"},"responses":[{"response_range":{"header":{}}},
            {"response_range":{"kvs":[{"key":"YQ==","create_revision":"2","mod_revision":"3","value":"aG9zdDox"}]}}]}"#,
        )
        .unwrap();
        assert!(!done.succeeded && done.key_value(0).is_none() && done.key_value(2).is_none());
        assert_eq!(done.revision().unwrap(), 7);
        assert_eq!(done.key_value(1).unwrap().text().unwrap(), "host:1");
        assert!(number("x").is_err());
    }
}
