//! Client of the master's admin server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use mooncake_wire::admin::{
    AdminSuccess, DescribePromptsRequest, DescribedObjects, HealthResponse, KeyReplicas, KvEventsStatus,
    SegmentsDetail,
};
use mooncake_wire::object_locations::{ListPosition, LocationBatch, MAX_BATCH};
use moongate_runtime::{PeerTls, plain_http_client};
use reqwest::StatusCode;
use reqwest::header::CONTENT_TYPE;
use serde::Deserialize;

use super::error::{AdminAddressError, AdminError, AdminResponseError, HttpRequestError, shortened};
use super::keys::KeyStream;
use super::query::{self, BatchKeyQuery};

/// Number of attempts within the time limit of a request, each on a new connection: a pooled one may lead to a host that is gone,
/// which only a new connection detects.
const MAX_ATTEMPTS: u32 = 2;
/// Bytes of an error response's body that go into the message.
const MAX_ERROR_BODY: usize = 200;

/// Limits of requests to the admin server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminClientOptions {
    /// Time limit for a response; when listing keys, for the time between two chunks.
    pub timeout: Duration,
    /// Time limit for the first byte of the key list. The master builds the whole list before it sends: seconds for a few million
    /// keys.
    pub list_timeout: Duration,
    /// Time limit for opening a connection.
    pub connect_timeout: Duration,
    /// Largest response that is buffered, in bytes. The key list is streamed instead.
    pub max_body: usize,
    /// Longest URL in bytes. It limits the keys per lookup request, at about 70 bytes each. The master accepts ten times this
    /// length, but a proxy in between may not.
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

/// Client of a master's admin server. Clones are cheap and share connections.
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
    /// When the address is not a host and a port.
    pub fn new(address: &str, options: AdminClientOptions) -> Result<Self, AdminError> {
        Self::authenticated(address, options, None)
    }

    /// As [`AdminClient::new`], over HTTPS with certificates if `tls` is given.
    ///
    /// # Errors
    /// As [`AdminClient::new`].
    pub fn authenticated(
        address: &str,
        options: AdminClientOptions,
        tls: Option<&PeerTls>,
    ) -> Result<Self, AdminError> {
        let unusable =
            |source: AdminAddressError| AdminError::Address { address: address.to_owned(), source };
        let (scheme, builder) = match tls {
            None => ("http://", plain_http_client()),
            Some(tls) => ("https://", tls.http_client()),
        };
        let host = address.strip_prefix(scheme).unwrap_or(address).trim_end_matches('/');
        let base = format!("{scheme}{host}");
        let url = reqwest::Url::parse(&base).map_err(|error| unusable(AdminAddressError::Url(error)))?;
        if host.contains("://") || url.path() != "/" || url.query().is_some() {
            return Err(unusable(AdminAddressError::NotHostAndPort));
        }
        let http = builder
            .connect_timeout(options.connect_timeout)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| unusable(HttpRequestError::from(error).into()))?;
        Ok(Self { http, base: base.into(), options, tls: tls.cloned() })
    }

    /// The master's role and readiness.
    ///
    /// # Errors
    /// When the server does not respond, or not like a master's admin server.
    pub async fn health(&self) -> Result<HealthResponse, AdminError> {
        let (url, body) = self.get("/health").await?;
        // Up to 0.3.9 a master has one role and one state, and responds only OK.
        if body.trim_ascii() == b"OK" {
            return Ok(HealthResponse {
                status: "ok".to_owned(),
                role: "leader".to_owned(),
                ha_state: "serving".to_owned(),
                service_ready: true,
                leader_address: None,
                view_version: None,
                problems: Vec::new(),
                shard: None,
            });
        }
        parsed(&url, &body)
    }

    /// Status of the master's KV event publisher.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] before 0.3.13, and as [`AdminClient::health`].
    pub async fn kv_events_status(&self) -> Result<KvEventsStatus, AdminError> {
        let (url, body) = self.get("/kv_events/status").await?;
        parsed(&url, &body)
    }

    /// Names of all segments.
    ///
    /// # Errors
    /// As [`AdminClient::health`].
    pub async fn segments(&self) -> Result<Vec<String>, AdminError> {
        let (url, body) = self.get("/get_all_segments").await?;
        let text = std::str::from_utf8(&body).map_err(|error| malformed(&url, error))?;
        Ok(text.split('\n').filter(|line| !line.is_empty()).map(str::to_owned).collect())
    }

    /// All segments with their nodes and usage.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] up to 0.3.11, and as [`AdminClient::health`].
    pub async fn segments_detail(&self) -> Result<SegmentsDetail, AdminError> {
        let (url, body) = self.get("/get_segments_detail").await?;
        parsed(&url, &body)
    }

    /// Starts to list the keys of all complete objects. While 0.3.13 builds the list, more than a second per million keys, its admin
    /// server responds to no other request.
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

    /// One batch of the list of readable objects of the default tenant, which [`Self::parse_object_locations`] parses. Objects are neither
    /// leased nor marked as used. `after`: the position in the batch before.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] if the master has no such extension, [`AdminError::Status`] with 410 if the position is another master's or
    /// from before its restart, and as [`AdminClient::health`].
    pub async fn object_locations(&self, after: Option<ListPosition>) -> Result<Bytes, AdminError> {
        let url = self.object_locations_url();
        let url = after.map_or(url.clone(), |after| format!("{url}?after={after}"));
        self.fetch_up_to(MAX_BATCH, &url).await
    }

    /// Parses the response of [`Self::object_locations`].
    ///
    /// # Errors
    /// If the batch is damaged, even if only in part.
    pub fn parse_object_locations<'b>(&self, bytes: &'b [u8]) -> Result<LocationBatch<'b>, AdminError> {
        LocationBatch::parse(bytes).map_err(|error| malformed(&self.object_locations_url(), error))
    }

    fn object_locations_url(&self) -> String {
        format!("{}/api/v1/object_locations", self.base)
    }

    /// Locates objects of the default tenant without leasing them or marking them as used. `found` is called with the master's
    /// record of each key, in no order, and possibly once for a key that is repeated in `keys`. Returns the number of skipped
    /// keys: empty ones, those with a comma, at which the master splits, and those longer than a URL may be. Masters up to
    /// 0.3.11 do not find keys with characters other than ASCII letters, digits and `-._~/:@`, and return them escaped.
    ///
    /// # Errors
    /// As [`AdminClient::health`]. `found` may have been called for some keys before.
    pub async fn locate<K: AsRef<str>>(
        &self,
        keys: &[K],
        mut found: impl FnMut(&str, &KeyReplicas<'_>),
    ) -> Result<usize, AdminError> {
        let (mut rest, mut skipped) = (keys, 0);
        while !rest.is_empty() {
            let query = self.next_query(rest);
            self.locate_part(&query, &mut found).await?;
            skipped += query.skipped;
            rest = rest.get(query.consumed..).unwrap_or_default();
        }
        Ok(skipped)
    }

    /// Sends what is known about prompts that have been used, for the store's retention.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] if the master has no such extension, and as [`AdminClient::health`].
    pub async fn describe_prompts(
        &self,
        request: &DescribePromptsRequest<'_>,
    ) -> Result<DescribedObjects, AdminError> {
        let url = format!("{}/api/v1/describe_prompts", self.base);
        let body = serde_json::to_vec(request).map_err(|error| malformed(&url, error))?;
        let sending = async {
            let request = self.http.post(&url).header(CONTENT_TYPE, "application/json").body(body);
            self.body(&url, self.checked(&url, request).await?, self.options.max_body).await
        };
        let limit = self.options.timeout;
        let body = tokio::time::timeout(limit, sending)
            .await
            .map_err(|_| AdminError::TimedOut { url: shortened(&url), limit })??;
        let response: AdminSuccess<DescribedObjects> = parsed(&url, &body)?;
        Ok(response.data)
    }

    /// TLS with the store's programs, if it is used.
    pub(crate) fn tls(&self) -> Option<PeerTls> {
        self.tls.clone()
    }

    /// The HTTP client, for other servers of the same store.
    pub(crate) fn http(&self) -> reqwest::Client {
        self.http.clone()
    }

    /// A request for as many of `keys` as fit into one URL.
    pub(crate) fn next_query<K: AsRef<str>>(&self, keys: &[K]) -> BatchKeyQuery {
        query::next(&self.base, keys, self.options.max_url)
    }

    /// Sends one lookup request and passes its results to `found`. Returns the response time.
    pub(crate) async fn locate_part(
        &self,
        query: &BatchKeyQuery,
        found: &mut impl FnMut(&str, &KeyReplicas<'_>),
    ) -> Result<Duration, AdminError> {
        if query.requested == 0 {
            return Ok(Duration::ZERO);
        }
        let requested_at = Instant::now();
        let body = self.fetch(&query.url).await?;
        let busy = requested_at.elapsed();
        query::read(&body, found).map_err(|error| malformed(&query.url, error))?;
        Ok(busy)
    }

    async fn get(&self, path: &str) -> Result<(String, Bytes), AdminError> {
        let url = format!("{}{path}", self.base);
        let body = self.fetch(&url).await?;
        Ok((url, body))
    }

    /// Fetches a whole body within the time limit.
    async fn fetch(&self, url: &str) -> Result<Bytes, AdminError> {
        self.fetch_up_to(self.options.max_body, url).await
    }

    /// As [`Self::fetch`], with a limit of the body in bytes.
    async fn fetch_up_to(&self, max_body: usize, url: &str) -> Result<Bytes, AdminError> {
        let limit = self.options.timeout;
        for _ in 0..MAX_ATTEMPTS {
            let reading = async { self.body(url, self.send(url).await?, max_body).await };
            // On timeout, dropping the future closes the connection.
            if let Ok(result) = tokio::time::timeout(limit / MAX_ATTEMPTS, reading).await {
                return result;
            }
        }
        Err(AdminError::TimedOut { url: shortened(url), limit })
    }

    async fn body(
        &self,
        url: &str,
        mut response: reqwest::Response,
        max_body: usize,
    ) -> Result<Bytes, AdminError> {
        let mut body = BytesMut::new();
        while let Some(part) =
            response.chunk().await.map_err(|error| failed(url, error, self.options.timeout))?
        {
            if body.len() + part.len() > max_body {
                return Err(malformed(url, AdminResponseError::TooLarge { limit: max_body }));
            }
            body.extend_from_slice(&part);
        }
        Ok(body.freeze())
    }

    async fn send(&self, url: &str) -> Result<reqwest::Response, AdminError> {
        self.checked(url, self.http.get(url)).await
    }

    /// Sends a request and checks the status.
    async fn checked(
        &self,
        url: &str,
        request: reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, AdminError> {
        let limit = self.options.timeout;
        let mut response = request.send().await.map_err(|error| failed(url, error, limit))?;
        let url = shortened(url);
        match response.status() {
            StatusCode::OK => Ok(response),
            StatusCode::NOT_FOUND => Err(AdminError::NotFound { url }),
            StatusCode::SERVICE_UNAVAILABLE => Err(AdminError::NotServing { url }),
            status => {
                let mut body = response.chunk().await.ok().flatten().unwrap_or_default();
                body.truncate(MAX_ERROR_BODY);
                let body = String::from_utf8_lossy(&body).trim().to_owned();
                Err(AdminError::Status { url, status: status.as_u16(), body })
            }
        }
    }
}

pub(super) fn failed(url: &str, error: reqwest::Error, limit: Duration) -> AdminError {
    let url = shortened(url);
    if error.is_timeout() && !error.is_connect() {
        AdminError::TimedOut { url, limit }
    } else {
        AdminError::Failed { url, source: error.into() }
    }
}

fn malformed(url: &str, error: impl Into<AdminResponseError>) -> AdminError {
    AdminError::Malformed { url: shortened(url), source: error.into() }
}

fn parsed<'b, T: Deserialize<'b>>(url: &str, body: &'b [u8]) -> Result<T, AdminError> {
    serde_json::from_slice(body).map_err(|error| malformed(url, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_other_than_host_and_port_are_rejected() {
        for good in ["127.0.0.1:9003", "http://master:9003/", "[::1]:9003"] {
            assert!(AdminClient::new(good, AdminClientOptions::default()).is_ok(), "{good}");
        }
        for bad in ["", "https://master:9003", "master:9003/metrics", "master:port", "etcd://a:1;b:2"] {
            let error = AdminClient::new(bad, AdminClientOptions::default()).unwrap_err().to_string();
            assert!(error.contains("unusable") && error.contains("host:port"), "{error}");
        }
    }
}
