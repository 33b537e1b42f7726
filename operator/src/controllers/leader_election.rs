//! Leader election: of several replicas, only the one that holds the Lease reconciles.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease as Object, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client, Error};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Error after this process has lost leadership.
#[derive(Debug, thiserror::Error)]
#[error("lease `{0}` was not renewed in time: another replica may lead now, so this one stops")]
pub struct LeadershipLost(String);

/// A Lease that this process tries to acquire, or holds.
pub(super) struct LeaderLease {
    api: Api<Object>,
    name: String,
    identity: String,
    duration: Duration,
    /// The last change of the Lease, with the time of our monotonic clock: other clocks may be wrong.
    last_observed: Mutex<Option<(LeaseSpec, Instant)>>,
}

impl LeaderLease {
    pub(super) fn new(client: Client, namespace: &str, name: &str, duration: Duration) -> Self {
        let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "moongate".to_owned());
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity: format!("{host}_{:016x}", fastrand::u64(..)),
            duration,
            last_observed: Mutex::default(),
        }
    }

    /// Waits until this process holds the Lease.
    pub(super) async fn acquire(&self) {
        tracing::info!(lease = self.name, identity = self.identity, "waiting to lead");
        loop {
            match self.acquire_or_renew(false).await {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(lease = self.name, %error, "cannot read or write the lease");
                }
            }
            tokio::time::sleep(self.retry_delay()).await;
        }
        tracing::info!(lease = self.name, "leading");
    }

    /// Renews the Lease until that fails.
    pub(super) async fn renew_until_lost(&self) -> LeadershipLost {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(self.retry_delay()).await;
            // Stop after two thirds of the duration, before another replica may start.
            let remaining = (renewed + self.duration * 2 / 3).saturating_duration_since(Instant::now());
            let started = Instant::now();
            match tokio::time::timeout(remaining, self.acquire_or_renew(true)).await {
                Ok(Ok(true)) => renewed = started,
                Ok(Ok(false)) | Err(_) => return LeadershipLost(self.name.clone()),
                Ok(Err(error)) => {
                    tracing::warn!(lease = self.name, %error, "lease not renewed; retrying");
                }
            }
        }
    }

    /// Releases the Lease, so that another replica can lead at once.
    pub(super) async fn release(&self) {
        let Ok(Some(mut live)) = self.api.get_opt(&self.name).await else { return };
        let spec = live.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() == Some(self.identity.as_str()) {
            spec.holder_identity = Some(String::new());
            if let Err(error) = self.api.replace(&self.name, &PostParams::default(), &live).await {
                tracing::info!(lease = self.name, %error, "lease not released; it will expire");
            }
        }
    }

    /// Acquires the Lease if it is free, or renews it. Returns whether this process holds it.
    async fn acquire_or_renew(&self, is_held: bool) -> Result<bool, Error> {
        let now = MicroTime(Timestamp::now());
        let Some(mut live) = self.api.get_opt(&self.name).await? else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let object = Object { metadata, spec: Some(self.spec(0, now.clone(), now)) };
            return is_written(self.api.create(&PostParams::default(), &object).await);
        };
        let spec = live.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let transitions = spec.lease_transitions.unwrap_or(0);
        let next = if holder == self.identity {
            self.spec(transitions, spec.acquire_time.clone().unwrap_or_else(|| now.clone()), now)
        } else if !is_held && (holder.is_empty() || self.has_lapsed(&spec)) {
            self.spec(transitions.saturating_add(1), now.clone(), now)
        } else {
            return Ok(false);
        };
        live.spec = Some(next);
        is_written(self.api.replace(&self.name, &PostParams::default(), &live).await)
    }

    fn has_lapsed(&self, spec: &LeaseSpec) -> bool {
        let mut last_observed = self.last_observed.lock();
        let holder_seconds = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
        match last_observed.as_ref().filter(|(before, _)| before == spec) {
            Some((_, since)) => since.elapsed() > self.duration.max(Duration::from_secs(holder_seconds)),
            None => {
                *last_observed = Some((spec.clone(), Instant::now()));
                false
            }
        }
    }

    fn spec(&self, transitions: i32, acquired: MicroTime, now: MicroTime) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.duration.as_secs().max(1)).ok(),
            lease_transitions: Some(transitions),
            acquire_time: Some(acquired),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }
    }

    fn retry_delay(&self) -> Duration {
        self.duration / 5
    }
}

/// Whether the write succeeded; `false` after a conflict with another replica.
fn is_written(result: Result<Object, Error>) -> Result<bool, Error> {
    match result {
        Ok(_) => Ok(true),
        Err(Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}
