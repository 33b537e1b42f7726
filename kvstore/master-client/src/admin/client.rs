//! The HTTP client.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use mooncake_wire::admin::{HealthResponse, KeyReplicas, KvEventsStatus, SegmentsDetail};
use moongate_runtime::{PeerTls, plain_http_client};
use reqwest::StatusCode;
use serde::Deserialize;

use super::error::{AdminError, root_cause, shortened};
use super::keys::KeyStream;
use super::query::{self, BatchKeyQuery};

/// How often a question is asked within its time limit, each time on another connection: the old one may lead to a host that has
/// vanished, of which only a new one tells.
const MAX_ATTEMPTS: u32 = 2;
/// Bytes of an error's body that are kept for the message.
const MAX_ERROR_BODY: usize = 200;

/// How the admin server is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminClientOptions {
    /// Time limit for an answer; when keys are listed, for the time between two parts of it.
    pub timeout: Duration,
    /// Time limit for the list of keys to begin. The master puts all of it together before it sends the first byte:
    /// seconds for some million keys.
    pub list_timeout: Duration,
    /// Time limit for opening a connection.
    pub connect_timeout: Duration,
    /// Largest answer that is held in memory, in bytes. The list of keys is not held.
    pub max_body: usize,
    /// Longest URL, in bytes. It bounds how many keys are located by one request: about 70 bytes each. The master
    /// takes ten times as much, a proxy between may not.
    pub max_url: usize,
}

impl Default for AdminClientOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(5),
            list_timeout: Duration::from_secs(120),
            connect_timeout: Duration::from_secs(1),
            max_body: 64 << 20,
            max_url: 60_000,
        }
    }
}

/// Asks a master's admin server. Cloning is cheap, and every clone has the same connections.
#[derive(Clone, Debug)]
pub struct AdminClient {
    http: reqwest::Client,
    base: Arc<str>,
    options: AdminClientOptions,
    tls: Option<PeerTls>,
}

impl AdminClient {
    /// A client of the admin server at `address`: `host:port`, or `http://host:port`.
    ///
    /// # Errors
    /// When the address is unusable.
    pub fn new(address: &str, options: AdminClientOptions) -> Result<Self, AdminError> {
        Self::authenticated(address, options, None)
    }

    /// The same over HTTPS with certificates, if `tls` is given.
    ///
    /// # Errors
    /// As [`AdminClient::new`].
    pub fn authenticated(
        address: &str,
        options: AdminClientOptions,
        tls: Option<&PeerTls>,
    ) -> Result<Self, AdminError> {
        let unusable = |reason: String| AdminError::Address { address: address.to_owned(), reason };
        let (scheme, builder) = match tls {
            None => ("http://", plain_http_client()),
            Some(tls) => ("https://", tls.http_client()),
        };
        let host = address.strip_prefix(scheme).unwrap_or(address).trim_end_matches('/');
        let base = format!("{scheme}{host}");
        let url = reqwest::Url::parse(&base).map_err(|error| unusable(error.to_string()))?;
        if host.contains("://") || url.path() != "/" || url.query().is_some() {
            return Err(unusable("it is not a host and a port".to_owned()));
        }
        let http = builder
            .connect_timeout(options.connect_timeout)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| unusable(root_cause(&error)))?;
        Ok(Self { http, base: base.into(), options, tls: tls.cloned() })
    }

    /// Whether the master serves.
    ///
    /// # Errors
    /// When the server does not answer as a master's admin server.
    pub async fn health(&self) -> Result<HealthResponse, AdminError> {
        let (url, body) = self.get("/health").await?;
        // Up to 0.3.9 there is one role and one state, and the answer says no more than this.
        if body.trim_ascii() == b"OK" {
            return Ok(HealthResponse {
                status: "ok".to_owned(),
                role: "leader".to_owned(),
                ha_state: "serving".to_owned(),
                service_ready: true,
                leader_address: None,
                view_version: None,
                problems: Vec::new(),
            });
        }
        parsed(&url, &body)
    }

    /// What the master publishes of its KV events.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] before 0.3.13, and as [`AdminClient::health`].
    pub async fn kv_events_status(&self) -> Result<KvEventsStatus, AdminError> {
        let (url, body) = self.get("/kv_events/status").await?;
        parsed(&url, &body)
    }

    /// The names of all segments.
    ///
    /// # Errors
    /// As [`AdminClient::health`].
    pub async fn segments(&self) -> Result<Vec<String>, AdminError> {
        let (url, body) = self.get("/get_all_segments").await?;
        let text = std::str::from_utf8(&body).map_err(|error| malformed(&url, error))?;
        Ok(text.split('\n').filter(|line| !line.is_empty()).map(str::to_owned).collect())
    }

    /// All segments, with their nodes and how full they are.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] up to 0.3.11, and as [`AdminClient::health`].
    pub async fn segments_detail(&self) -> Result<SegmentsDetail, AdminError> {
        let (url, body) = self.get("/get_segments_detail").await?;
        parsed(&url, &body)
    }

    /// Begins to list the keys of all complete objects. While 0.3.13 puts its answer together, more than a second for each million of
    /// keys, its admin server answers nobody.
    ///
    /// # Errors
    /// As [`AdminClient::health`].
    pub async fn keys(&self) -> Result<KeyStream, AdminError> {
        let (url, limit) = (format!("{}/get_all_keys", self.base), self.options.list_timeout);
        match tokio::time::timeout(limit, self.send(&url)).await {
            Ok(response) => Ok(KeyStream::new(response?, url, self.options.timeout)),
            Err(_) => Err(AdminError::TimedOut { url, limit }),
        }
    }

    /// Looks up where objects of the default tenant are, without leasing them or counting as use. `found` is told
    /// what the master knows of each key, in no order; a key twice among `keys` may be told once. Returns how many
    /// keys were left out because they cannot be asked for: those that are empty or have a comma, at which the
    /// master would split them, and those longer than a URL may be. Masters up to 0.3.11 do not find keys that have
    /// other characters than ASCII letters, digits and `-._~/:@`, and tell them with those characters escaped.
    ///
    /// # Errors
    /// As [`AdminClient::health`]. Then `found` may have been told of some keys.
    pub async fn locate<K: AsRef<str>>(
        &self,
        keys: &[K],
        mut found: impl FnMut(&str, &KeyReplicas<'_>),
    ) -> Result<usize, AdminError> {
        let (mut rest, mut left_out) = (keys, 0);
        while !rest.is_empty() {
            let part = self.next_query(rest);
            self.locate_part(&part, &mut found).await?;
            left_out += part.skipped;
            rest = rest.get(part.consumed..).unwrap_or_default();
        }
        Ok(left_out)
    }

    /// TLS with the programs of the store, if it is used.
    pub(crate) fn tls(&self) -> Option<PeerTls> {
        self.tls.clone()
    }

    /// The HTTP client, for servers that belong to the same store.
    pub(crate) fn http(&self) -> reqwest::Client {
        self.http.clone()
    }

    /// The request for as many of `keys` as fit into one.
    pub(crate) fn next_query<K: AsRef<str>>(&self, keys: &[K]) -> BatchKeyQuery {
        query::next(&self.base, keys, self.options.max_url)
    }

    /// Sends one request and tells its answer. Returns for how long the master was at it, seen from here.
    pub(crate) async fn locate_part(
        &self,
        query: &BatchKeyQuery,
        found: &mut impl FnMut(&str, &KeyReplicas<'_>),
    ) -> Result<Duration, AdminError> {
        if query.requested == 0 {
            return Ok(Duration::ZERO);
        }
        let asked_at = Instant::now();
        let body = self.fetch(&query.url).await?;
        let busy = asked_at.elapsed();
        query::read(&body, found).map_err(|error| malformed(&query.url, error))?;
        Ok(busy)
    }

    async fn get(&self, path: &str) -> Result<(String, Bytes), AdminError> {
        let url = format!("{}{path}", self.base);
        let body = self.fetch(&url).await?;
        Ok((url, body))
    }

    /// A whole body, within the time limit.
    async fn fetch(&self, url: &str) -> Result<Bytes, AdminError> {
        let limit = self.options.timeout;
        for _ in 0..MAX_ATTEMPTS {
            let reading = async { self.body(url, self.send(url).await?).await };
            // Giving up closes the connection.
            if let Ok(result) = tokio::time::timeout(limit / MAX_ATTEMPTS, reading).await {
                return result;
            }
        }
        Err(AdminError::TimedOut { url: shortened(url), limit })
    }

    async fn body(&self, url: &str, mut response: reqwest::Response) -> Result<Bytes, AdminError> {
        let mut body = BytesMut::new();
        while let Some(part) = response.chunk().await.map_err(|e| failed(url, &e, self.options.timeout))? {
            if body.len() + part.len() > self.options.max_body {
                let reason = format!("the answer has more than {} bytes", self.options.max_body);
                return Err(malformed(url, reason));
            }
            body.extend_from_slice(&part);
        }
        Ok(body.freeze())
    }

    /// Sends a request and checks the status.
    async fn send(&self, url: &str) -> Result<reqwest::Response, AdminError> {
        let limit = self.options.timeout;
        let mut response = self.http.get(url).send().await.map_err(|error| failed(url, &error, limit))?;
        let url = shortened(url);
        match response.status() {
            StatusCode::OK => Ok(response),
            StatusCode::NOT_FOUND => Err(AdminError::NotFound { url }),
            StatusCode::SERVICE_UNAVAILABLE => Err(AdminError::NotServing { url }),
            status => {
                let mut said = response.chunk().await.ok().flatten().unwrap_or_default();
                said.truncate(MAX_ERROR_BODY);
                let said = String::from_utf8_lossy(&said).trim().to_owned();
                Err(AdminError::Status { url, status: status.as_u16(), body: said })
            }
        }
    }
}

pub(super) fn failed(url: &str, error: &reqwest::Error, limit: Duration) -> AdminError {
    let url = shortened(url);
    if error.is_timeout() && !error.is_connect() {
        AdminError::TimedOut { url, limit }
    } else {
        AdminError::Failed { url, reason: root_cause(error) }
    }
}

fn malformed(url: &str, reason: impl ToString) -> AdminError {
    AdminError::Malformed { url: shortened(url), reason: reason.to_string() }
}

fn parsed<'b, T: Deserialize<'b>>(url: &str, body: &'b [u8]) -> Result<T, AdminError> {
    serde_json::from_slice(body).map_err(|error| malformed(url, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_are_addresses() {
        for good in ["127.0.0.1:9003", "http://master:9003/", "[::1]:9003"] {
            assert!(AdminClient::new(good, AdminClientOptions::default()).is_ok(), "{good}");
        }
        for bad in ["", "https://master:9003", "master:9003/metrics", "master:port", "etcd://a:1;b:2"] {
            let error = AdminClient::new(bad, AdminClientOptions::default()).unwrap_err().to_string();
            assert!(error.contains("unusable") && error.contains("host:port"), "{error}");
        }
    }
}
