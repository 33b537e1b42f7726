//! Leader election: of several replicas, only the one that holds the Lease reconciles.
//!
//! A renewal may fail several times: each attempt has a time limit far below that of the renewal, and failed attempts are repeated as
//! long as the Lease is certainly valid. The API server's `Retry-After` is honoured, but never beyond that time.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease as LeaseObject;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Error;
use moongate_kube_lease::{self as kube_lease, LeaseClient, ObservedLease};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::lease_connection::LeaseConnection;

/// Error after this process has lost leadership.
#[derive(Debug, thiserror::Error)]
#[error("lease `{0}` was not renewed in time: another replica may lead now, so this one stops")]
pub struct LeadershipLost(String);

/// A Lease that this process tries to acquire, or holds.
pub(super) struct LeaderLease {
    connection: LeaseConnection,
    client: LeaseClient,
    identity: String,
    timing: LeaseTiming,
    /// The Lease as this process stored it last: a renewal need not read it first.
    stored: Mutex<Option<LeaseObject>>,
}

/// Minimum time limit of an attempt.
const MIN_LIMIT: Duration = Duration::from_millis(100);
/// Minimum pause after a failed attempt.
const MIN_PAUSE: Duration = Duration::from_millis(20);

/// Times derived from the duration of a Lease; in parentheses for the default of 15 s.
#[derive(Debug, Clone, Copy)]
struct LeaseTiming {
    duration: Duration,
}

impl LeaseTiming {
    /// Interval between renewals, and between attempts to acquire a held Lease (2 s).
    fn interval(self) -> Duration {
        self.duration * 2 / 15
    }

    /// Time since the last renewal after which this process stops: before another replica may start (10 s).
    fn renewal_deadline(self) -> Duration {
        self.duration * 2 / 3
    }

    /// Time limit of a renewal's first attempt (1 s). Each timeout extends the next limit by half, for a slow API server.
    fn attempt_limit(self) -> Duration {
        self.duration / 15
    }

    /// Time limit of the first attempt to acquire the Lease, and of its release (3 s).
    fn acquire_limit(self) -> Duration {
        self.duration / 5
    }

    /// Pause after a failed attempt without a `Retry-After` (300 ms).
    fn retry_pause(self) -> Duration {
        self.duration / 50
    }
}

/// Result of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaseAttempt {
    /// This process holds the Lease.
    Held,
    HeldByOther,
    /// The Lease has changed since it was read.
    Conflict,
}

impl LeaderLease {
    pub(super) fn new(connection: LeaseConnection, namespace: &str, name: &str, duration: Duration) -> Self {
        let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "moongate".to_owned());
        Self {
            client: LeaseClient::new(connection.client.clone(), namespace, name, duration),
            connection,
            identity: format!("{host}_{:016x}", fastrand::u64(..)),
            timing: LeaseTiming { duration },
            stored: Mutex::default(),
        }
    }

    /// Waits until this process holds the Lease. Returns the time from which that counts.
    pub(super) async fn acquire(&self) -> Instant {
        let (lease, mut limit) = (self.client.name(), self.timing.acquire_limit());
        tracing::info!(lease, identity = self.identity, "waiting to lead");
        loop {
            let started = Instant::now();
            let attempt = self.acquire_or_renew(false);
            let pause = match tokio::time::timeout(limit, attempt).await {
                Ok(Ok(LeaseAttempt::Held)) => {
                    tracing::info!(lease, "leading");
                    return started;
                }
                Ok(Ok(LeaseAttempt::HeldByOther | LeaseAttempt::Conflict)) => self.timing.interval(),
                Ok(Err(error)) => {
                    tracing::warn!(lease, %error, "cannot read or write the lease");
                    self.pause_after_failure(self.timing.renewal_deadline())
                }
                Err(_) => {
                    tracing::warn!(lease, ?limit, "no response to a request for the lease");
                    // For a slow API server.
                    limit = (limit + limit / 2).min(self.timing.renewal_deadline());
                    Duration::ZERO
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Renews the Lease, which counts as renewed at the given time, until that fails.
    pub(super) async fn renew_until_lost(&self, mut renewed: Instant) -> LeadershipLost {
        loop {
            tokio::time::sleep(self.timing.interval()).await;
            match self.renew(renewed + self.timing.renewal_deadline()).await {
                Some(time) => renewed = time,
                None => return LeadershipLost(self.client.name().to_owned()),
            }
        }
    }

    /// Renews the Lease once, with as many attempts as fit before the deadline. Returns the time from which the renewal counts; `None`
    /// if the Lease is lost.
    async fn renew(&self, deadline: Instant) -> Option<Instant> {
        let (lease, mut limit) = (self.client.name(), self.timing.attempt_limit());
        loop {
            let started = Instant::now();
            let remaining = deadline.checked_duration_since(started).filter(|left| !left.is_zero())?;
            // Another attempt always fits, however many get no response.
            let attempt_limit = limit.min((remaining / 2).max(MIN_LIMIT)).min(remaining);
            match tokio::time::timeout(attempt_limit, self.acquire_or_renew(true)).await {
                Ok(Ok(LeaseAttempt::Held)) => return Some(started),
                Ok(Ok(LeaseAttempt::HeldByOther)) => return None,
                // Possibly an earlier attempt whose response was lost. The next one reads the Lease.
                Ok(Ok(LeaseAttempt::Conflict)) => {}
                Ok(Err(error)) => {
                    tracing::warn!(lease, %error, "lease not renewed; retrying");
                    let left = deadline.saturating_duration_since(Instant::now());
                    tokio::time::sleep(self.pause_after_failure(left)).await;
                }
                Err(_) => {
                    tracing::warn!(lease, limit = ?attempt_limit, "no response to a renewal of the lease; retrying");
                    limit += limit / 2;
                }
            }
        }
    }

    /// The pause that the API server requests, but at most a quarter of the remaining time: the last attempts follow each other faster.
    fn pause_after_failure(&self, remaining: Duration) -> Duration {
        let requested = self.connection.take_requested_pause();
        requested.unwrap_or_else(|| self.timing.retry_pause()).min(remaining / 4).max(MIN_PAUSE)
    }

    /// Releases the Lease, so that another replica can lead at once.
    pub(super) async fn release(&self) {
        let name = self.client.name();
        let release = async {
            let Some(ObservedLease { mut lease, .. }) = self.client.read().await? else { return Ok(None) };
            if !self.is_held(&lease) {
                return Ok(None);
            }
            kube_lease::release(&mut lease);
            self.client.replace(&lease).await
        };
        match tokio::time::timeout(self.timing.acquire_limit(), release).await {
            Ok(Ok(Some(_))) => {}
            Ok(Ok(None)) => tracing::info!(lease = name, "lease not released, because it has changed"),
            Ok(Err(error)) => tracing::info!(lease = name, %error, "lease not released; it will expire"),
            Err(_) => tracing::info!(lease = name, "lease not released in time; it will expire"),
        }
    }

    /// Acquires the Lease if it is free, or renews it.
    async fn acquire_or_renew(&self, is_held: bool) -> Result<LeaseAttempt, Error> {
        let now = MicroTime(Timestamp::now());
        let stored = self.stored.lock().clone().filter(|_| is_held);
        let (mut lease, is_alive) = match stored {
            Some(lease) => (lease, true),
            None => match self.client.read().await? {
                Some(ObservedLease { lease, is_alive }) => (lease, is_alive),
                None => {
                    let mut lease = kube_lease::empty(self.client.name());
                    self.take(&mut lease, 0, now);
                    return Ok(self.store(self.client.create(&lease).await?));
                }
            },
        };
        if self.is_held(&lease) {
            kube_lease::renew(&mut lease, now);
        } else if !is_held && !is_alive {
            let transitions = kube_lease::transitions(&lease).saturating_add(1);
            self.take(&mut lease, transitions, now);
        } else {
            return Ok(LeaseAttempt::HeldByOther);
        }
        match self.client.replace(&lease).await {
            Ok(written) => Ok(self.store(written)),
            Err(error) => {
                // It may have been deleted. An overloaded server needs no additional read.
                if matches!(&error, Error::Api(status) if status.code == 404) {
                    *self.stored.lock() = None;
                }
                Err(error)
            }
        }
    }

    fn store(&self, written: Option<LeaseObject>) -> LeaseAttempt {
        let is_written = written.is_some();
        *self.stored.lock() = written;
        if is_written { LeaseAttempt::Held } else { LeaseAttempt::Conflict }
    }

    fn is_held(&self, lease: &LeaseObject) -> bool {
        kube_lease::holder(lease) == Some(self.identity.as_str())
    }

    fn take(&self, lease: &mut LeaseObject, transitions: i32, now: MicroTime) {
        let seconds = i32::try_from(self.timing.duration.as_secs().max(1)).unwrap_or(i32::MAX);
        kube_lease::acquire(lease, &self.identity, seconds, transitions, now);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::Arc;

    use http::{Method, Request, Response, StatusCode};
    use http_body_util::BodyExt as _;
    use kube::client::{Body, ClientBuilder};
    use serde_json::{Value, json};
    use tower::BoxError;

    use super::*;

    const DURATION: Duration = Duration::from_secs(15);

    /// An API server with one Lease. Some requests get status 429, and some get no response, whether they were carried out or not.
    struct UnreliableApiServer {
        lease: Mutex<(Option<Value>, u64)>,
        random: Mutex<fastrand::Rng>,
        /// Of 1000 requests.
        rejected: u32,
        silent: u32,
        requests: Mutex<u64>,
    }

    impl UnreliableApiServer {
        fn new(rejected: u32, silent: u32) -> Arc<Self> {
            let random = Mutex::new(fastrand::Rng::with_seed(7));
            Arc::new(Self { lease: Mutex::default(), random, rejected, silent, requests: Mutex::default() })
        }

        async fn handle(&self, request: Request<Body>) -> Result<Response<Body>, BoxError> {
            tokio::time::sleep(Duration::from_millis(5)).await;
            *self.requests.lock() += 1;
            let number = self.random.lock().u32(..1000);
            if number < self.rejected {
                return Ok(status(StatusCode::TOO_MANY_REQUESTS));
            }
            let is_silent = number >= 1000 - self.silent;
            if is_silent && number.is_multiple_of(2) {
                return pending().await;
            }
            let response = self.carry_out(request).await;
            if is_silent { pending().await } else { Ok(response) }
        }

        async fn carry_out(&self, request: Request<Body>) -> Response<Body> {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let (lease, version) = &mut *self.lease.lock();
            if head.method != Method::GET {
                let mut new: Value = serde_json::from_slice(&body).unwrap();
                let is_current = match lease {
                    Some(live) => live["metadata"]["resourceVersion"] == new["metadata"]["resourceVersion"],
                    None => head.method == Method::POST,
                };
                if !is_current {
                    return status(StatusCode::CONFLICT);
                }
                *version += 1;
                new["metadata"]["resourceVersion"] = version.to_string().into();
                *lease = Some(new);
            }
            match lease {
                Some(lease) => Response::new(Body::from(lease.to_string().into_bytes())),
                None => status(StatusCode::NOT_FOUND),
            }
        }
    }

    fn status(code: StatusCode) -> Response<Body> {
        let reason = code.canonical_reason().map(|reason| reason.replace(' ', ""));
        let body = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "by the test",
            "reason": reason, "code": code.as_u16() });
        let response = Response::builder().status(code);
        let response = match code {
            StatusCode::TOO_MANY_REQUESTS => response.header("Retry-After", "1"),
            _ => response,
        };
        response.body(Body::from(body.to_string().into_bytes())).unwrap()
    }

    fn lease_on(server: &Arc<UnreliableApiServer>) -> LeaderLease {
        let server = Arc::clone(server);
        let service = tower::service_fn(move |request| {
            let server = Arc::clone(&server);
            async move { server.handle(request).await }
        });
        let connection = LeaseConnection::new(ClientBuilder::new(service, "n"));
        LeaderLease::new(connection, "n", "lease", DURATION)
    }

    #[tokio::test(start_paused = true)]
    async fn an_overloaded_server_costs_no_leadership() {
        let server = UnreliableApiServer::new(300, 50);
        let lease = lease_on(&server);
        let started = Instant::now();
        let acquired = lease.acquire().await;
        assert!(started.elapsed() < DURATION, "{:?}", started.elapsed());
        let hours = Duration::from_secs(2 * 3600);
        let lost = tokio::time::timeout(hours, lease.renew_until_lost(acquired)).await;
        assert!(lost.is_err(), "{lost:?} after {:?}", started.elapsed());
        let per_minute = *server.requests.lock() / (2 * 60);
        assert!((25..80).contains(&per_minute), "{per_minute} requests per minute");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_without_response_is_lost_in_time() {
        let server = UnreliableApiServer::new(0, 0);
        let lease = lease_on(&server);
        lease.acquire().await;
        for rejected in [1000, 0] {
            let silent = UnreliableApiServer::new(rejected, 1000 - rejected);
            let client = LeaderLease { identity: lease.identity.clone(), ..lease_on(&silent) };
            *client.stored.lock() = lease.stored.lock().clone();
            let lost = Instant::now();
            client.renew_until_lost(lost).await;
            assert_eq!(lost.elapsed().as_secs(), DURATION.as_secs() * 2 / 3, "{rejected}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn another_holder_ends_leadership_at_once() {
        let server = UnreliableApiServer::new(0, 0);
        let (first, second) = (lease_on(&server), lease_on(&server));
        first.acquire().await;
        assert_eq!(second.acquire_or_renew(false).await.unwrap(), LeaseAttempt::HeldByOther);
        let mut stolen = first.stored.lock().clone().unwrap();
        second.take(&mut stolen, 1, MicroTime(Timestamp::now()));
        assert!(second.client.replace(&stolen).await.unwrap().is_some());
        let started = Instant::now();
        first.renew_until_lost(started).await;
        assert!(started.elapsed() < DURATION / 5, "{:?}", started.elapsed());
    }
}
