//! A Lease of `coordination.k8s.io` as a lock of which several processes may become the holder, as in client-go's leader election.
//!
//! Every write replaces the Lease with the `resourceVersion` that was read, so that the API server rejects it if the Lease has changed
//! since. Whether a holder still renews is decided by the observer's own clock.

mod liveness;

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client, Error};
use parking_lot::Mutex;

use liveness::LeaseLivenessTracker;

/// A Lease as it was read.
#[derive(Clone, Debug)]
pub struct ObservedLease {
    pub lease: Lease,
    /// Whether it has a holder that renewed it within its duration.
    pub is_alive: bool,
}

/// Reads, creates and replaces one Lease.
pub struct LeaseClient {
    leases: Api<Lease>,
    name: String,
    /// Minimum time without a renewal that a holder is granted.
    min_duration: Duration,
    liveness: Mutex<LeaseLivenessTracker>,
}

impl LeaseClient {
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str, min_duration: Duration) -> Self {
        Self {
            leases: Api::namespaced(client, namespace),
            name: name.to_owned(),
            min_duration,
            liveness: Mutex::default(),
        }
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads the Lease, and records when it last changed. `None` if it does not exist.
    ///
    /// # Errors
    /// The request failed.
    pub async fn read(&self) -> Result<Option<ObservedLease>, Error> {
        let requested = Instant::now();
        let Some(lease) = self.leases.get_opt(&self.name).await? else { return Ok(None) };
        let is_alive = self.liveness.lock().is_alive(&lease, requested, Instant::now(), self.min_duration);
        Ok(Some(ObservedLease { lease, is_alive }))
    }

    /// Creates the Lease and returns it as stored. `None` if another client was faster.
    ///
    /// # Errors
    /// The request failed.
    pub async fn create(&self, lease: &Lease) -> Result<Option<Lease>, Error> {
        without_conflict(self.leases.create(&PostParams::default(), lease).await)
    }

    /// Replaces the Lease and returns it as stored. `None` if it has changed since it was read.
    ///
    /// # Errors
    /// The request failed, or the Lease was deleted.
    pub async fn replace(&self, lease: &Lease) -> Result<Option<Lease>, Error> {
        without_conflict(self.leases.replace(&self.name, &PostParams::default(), lease).await)
    }
}

fn without_conflict(written: Result<Lease, Error>) -> Result<Option<Lease>, Error> {
    match written {
        Err(Error::Api(status)) if status.code == 409 => Ok(None),
        written => written.map(Some),
    }
}

/// A Lease of this name without a holder.
#[must_use]
pub fn empty(name: &str) -> Lease {
    let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
    Lease { metadata, spec: Some(LeaseSpec::default()) }
}

/// The holder, whether its lease has expired or not.
#[must_use]
pub fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

/// How often the holder has changed.
#[must_use]
pub fn transitions(lease: &Lease) -> i32 {
    lease.spec.as_ref().and_then(|spec| spec.lease_transitions).unwrap_or(0)
}

/// Sets a new holder.
pub fn acquire(lease: &mut Lease, holder: &str, duration_seconds: i32, transitions: i32, now: MicroTime) {
    lease.spec = Some(LeaseSpec {
        holder_identity: Some(holder.to_owned()),
        lease_duration_seconds: Some(duration_seconds),
        lease_transitions: Some(transitions),
        acquire_time: Some(now.clone()),
        renew_time: Some(now),
        ..LeaseSpec::default()
    });
}

/// Renews the Lease for its holder.
pub fn renew(lease: &mut Lease, now: MicroTime) {
    lease.spec.get_or_insert_default().renew_time = Some(now);
}

/// Removes the holder, so that another process can acquire the Lease at once.
pub fn release(lease: &mut Lease) {
    lease.spec.get_or_insert_default().holder_identity = Some(String::new());
}
