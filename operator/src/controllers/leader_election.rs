//! Leader election: of several replicas, only the one that holds the Lease reconciles.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease as LeaseObject;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::{Client, Error};
use moongate_kube_lease::{self as kube_lease, LeaseClient, ObservedLease};
use tokio::time::Instant;

/// Error after this process has lost leadership.
#[derive(Debug, thiserror::Error)]
#[error("lease `{0}` was not renewed in time: another replica may lead now, so this one stops")]
pub struct LeadershipLost(String);

/// A Lease that this process tries to acquire, or holds.
pub(super) struct LeaderLease {
    client: LeaseClient,
    identity: String,
    duration: Duration,
}

impl LeaderLease {
    pub(super) fn new(client: Client, namespace: &str, name: &str, duration: Duration) -> Self {
        let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "moongate".to_owned());
        Self {
            client: LeaseClient::new(client, namespace, name, duration),
            identity: format!("{host}_{:016x}", fastrand::u64(..)),
            duration,
        }
    }

    /// Waits until this process holds the Lease.
    pub(super) async fn acquire(&self) {
        tracing::info!(lease = self.client.name(), identity = self.identity, "waiting to lead");
        loop {
            match self.acquire_or_renew(false).await {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(lease = self.client.name(), %error, "cannot read or write the lease");
                }
            }
            tokio::time::sleep(self.retry_delay()).await;
        }
        tracing::info!(lease = self.client.name(), "leading");
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
                Ok(Ok(false)) | Err(_) => return LeadershipLost(self.client.name().to_owned()),
                Ok(Err(error)) => {
                    tracing::warn!(lease = self.client.name(), %error, "lease not renewed; retrying");
                }
            }
        }
    }

    /// Releases the Lease, so that another replica can lead at once.
    pub(super) async fn release(&self) {
        let Ok(Some(ObservedLease { mut lease, .. })) = self.client.read().await else { return };
        if !self.is_held(&lease) {
            return;
        }
        kube_lease::release(&mut lease);
        let name = self.client.name();
        match self.client.replace(&lease).await {
            Ok(Some(_)) => {}
            Ok(None) => tracing::info!(lease = name, "lease not released, because it has changed"),
            Err(error) => tracing::info!(lease = name, %error, "lease not released; it will expire"),
        }
    }

    /// Acquires the Lease if it is free, or renews it. Returns whether this process holds it.
    async fn acquire_or_renew(&self, is_held: bool) -> Result<bool, Error> {
        let now = MicroTime(Timestamp::now());
        let Some(ObservedLease { mut lease, is_alive }) = self.client.read().await? else {
            let mut lease = kube_lease::empty(self.client.name());
            self.take(&mut lease, 0, now);
            return Ok(self.client.create(&lease).await?.is_some());
        };
        if self.is_held(&lease) {
            kube_lease::renew(&mut lease, now);
        } else if !is_held && !is_alive {
            let transitions = kube_lease::transitions(&lease).saturating_add(1);
            self.take(&mut lease, transitions, now);
        } else {
            return Ok(false);
        }
        Ok(self.client.replace(&lease).await?.is_some())
    }

    fn is_held(&self, lease: &LeaseObject) -> bool {
        kube_lease::holder(lease) == Some(self.identity.as_str())
    }

    fn take(&self, lease: &mut LeaseObject, transitions: i32, now: MicroTime) {
        let seconds = i32::try_from(self.duration.as_secs().max(1)).unwrap_or(i32::MAX);
        kube_lease::acquire(lease, &self.identity, seconds, transitions, now);
    }

    fn retry_delay(&self) -> Duration {
        self.duration / 5
    }
}
