//! A Kubernetes Lease as the store that masters decide with.
//!
//! Every change is a replacement of the Lease as it was read (its `resourceVersion` goes along), so that the API server refuses it if
//! anything has changed in between.

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::config::KubeConfigOptions;
use kube::{Api, Client, Config};
use parking_lot::Mutex;

use super::coordinator::{
    Candidacy, CoordinationError, ElectionView, HaCoordinator, InSyncUpdateOutcome, LeaderTerm,
};
use super::fence::now;
use super::lease::{self, LeaseLivenessTracker};
use super::member::InSyncSet;

/// How often a change is tried that others' changes got ahead of. Nobody but its holder changes a Lease that is held, except by hand.
const MAX_ATTEMPTS: usize = 5;
/// Where a Lease is whose namespace is not told.
const NAMESPACE: &str = "default";

/// A Lease, by where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    /// Its namespace.
    pub namespace: String,
    /// Its name there.
    pub name: String,
}

impl LeaseName {
    /// Reads `NAMESPACE/NAME`, or `NAME` in the namespace `default`, as Mooncake's master does. Nothing if it is something else.
    pub fn read(text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/').unwrap_or((NAMESPACE, text));
        let is_label = |label: &str| {
            let mut letters = label.bytes();
            let is_fine = letters.all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-');
            is_fine && !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
        };
        let is_fine = is_label(namespace) && name.len() <= 253 && name.split('.').all(is_label);
        is_fine.then(|| Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

/// Configuration of a client, looked for where Mooncake's master does: the pod's service account, the file that `KUBECONFIG` names,
/// the user's own.
///
/// # Errors
/// When there is none, or none that can be used.
pub async fn config() -> Result<Config, CoordinationError> {
    if let Ok(config) = Config::incluster() {
        return Ok(config);
    }
    Config::from_kubeconfig(&KubeConfigOptions::default())
        .await
        .map_err(|error| CoordinationError(format!("no way to Kubernetes is known: {error}")))
}

/// A client of the API server for one Lease.
pub struct LeaseCoordinator {
    leases: Api<Lease>,
    name: String,
    /// For how long a leader holds it at least.
    min_lease: Duration,
    liveness: Mutex<LeaseLivenessTracker>,
    /// The Lease as this master last wrote it, so that a renewal need not read it first. Locked while it is changed: renewals and lists
    /// would only get into each other's way.
    last_written: tokio::sync::Mutex<Option<Lease>>,
}

fn failed(error: kube::Error) -> CoordinationError {
    match error {
        kube::Error::Api(status) => {
            CoordinationError(format!("Kubernetes says {}: {}", status.code, status.message))
        }
        error => CoordinationError(format!("Kubernetes: {error}")),
    }
}

/// Whether somebody else was faster: the Lease has changed, was made, or was deleted.
fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 404 | 409))
}

fn time() -> MicroTime {
    MicroTime(Timestamp::now())
}

/// What to do with the Lease as it is.
enum LeaseUpdate<T> {
    /// This, and it is written.
    Write(T),
    /// Nothing is to be changed.
    Unchanged(T),
}

impl LeaseCoordinator {
    /// A client for this Lease, for masters that hold it for `lease` at a time. The client's connections belong to the runtime that
    /// this is called in.
    ///
    /// # Errors
    /// When the client's configuration cannot be used.
    pub fn new(config: Config, name: &LeaseName, lease: Duration) -> Result<Self, CoordinationError> {
        let client = Client::try_from(config).map_err(failed)?;
        Ok(Self {
            leases: Api::namespaced(client, &name.namespace),
            name: name.name.clone(),
            min_lease: lease,
            liveness: Mutex::default(),
            last_written: tokio::sync::Mutex::default(),
        })
    }

    /// The Lease, and what it says now.
    async fn read(&self) -> Result<(Option<Lease>, ElectionView), CoordinationError> {
        let asked = now();
        let Some(found) = self.leases.get_opt(&self.name).await.map_err(failed)? else {
            return Ok((None, ElectionView::default()));
        };
        let is_alive = self.liveness.lock().is_alive(&found, asked, now(), self.min_lease);
        let view = lease::view(&found, is_alive)?;
        Ok((Some(found), view))
    }

    /// Writes it, if nobody else has changed it. Nothing if somebody has.
    async fn write(&self, changed: &Lease) -> Result<Option<Lease>, CoordinationError> {
        match self.leases.replace(&self.name, &PostParams::default(), changed).await {
            Ok(stored) => Ok(Some(stored)),
            Err(error) if is_conflict(&error) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Changes it while this leader holds it. Nothing if it does not.
    async fn change<T>(
        &self,
        tenure: LeaderTerm,
        change: impl Fn(&mut Lease) -> Result<LeaseUpdate<T>, CoordinationError>,
    ) -> Result<Option<T>, CoordinationError> {
        let mut written = self.last_written.lock().await;
        for _ in 0..MAX_ATTEMPTS {
            // Taken out: after a conflict it is of no more use.
            let found = match written.take().filter(|it| lease::is_held(it, tenure.term)) {
                Some(written) => Some(written),
                None => self.leases.get_opt(&self.name).await.map_err(failed)?,
            };
            let Some(mut found) = found.filter(|it| lease::is_held(it, tenure.term)) else { return Ok(None) };
            match change(&mut found)? {
                LeaseUpdate::Unchanged(told) => return Ok(Some(told)),
                LeaseUpdate::Write(told) => {
                    *written = self.write(&found).await?;
                    if written.is_some() {
                        return Ok(Some(told));
                    }
                }
            }
        }
        Err(CoordinationError("others change the Lease all the time".to_owned()))
    }
}

#[async_trait]
impl HaCoordinator for LeaseCoordinator {
    async fn observe(&self) -> Result<ElectionView, CoordinationError> {
        Ok(self.read().await?.1)
    }

    async fn campaign(&self, bid: &Candidacy) -> Result<Option<LeaderTerm>, CoordinationError> {
        let (found, view) = self.read().await?;
        if view.leader.is_some() || view.revision() != bid.revision {
            return Ok(None);
        }
        let mut found = match found {
            Some(found) => found,
            None => match self.leases.create(&PostParams::default(), &lease::empty(&self.name)).await {
                Ok(made) => made,
                Err(error) if is_conflict(&error) => return Ok(None),
                Err(error) => return Err(failed(error)),
            },
        };
        let term = lease::acquire(&mut found, bid, time())?;
        let written = self.write(&found).await?;
        Ok(written.map(|_| LeaderTerm { term, lease: term }))
    }

    async fn renew(&self, tenure: LeaderTerm) -> Result<bool, CoordinationError> {
        let renewed = self.change(tenure, |found| {
            lease::renew(found, time());
            Ok(LeaseUpdate::Write(()))
        });
        Ok(renewed.await?.is_some())
    }

    async fn update_in_sync(
        &self,
        tenure: LeaderTerm,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<InSyncUpdateOutcome, CoordinationError> {
        let listed = self.change(tenure, |found| {
            if lease::view(found, true)?.revision() != revision {
                return Ok(LeaseUpdate::Unchanged(InSyncUpdateOutcome::Conflict));
            }
            let next = revision.saturating_add(1);
            lease::set_in_sync(found, members, next);
            Ok(LeaseUpdate::Write(InSyncUpdateOutcome::Stored(next)))
        });
        Ok(listed.await?.unwrap_or(InSyncUpdateOutcome::Deposed))
    }

    async fn update_in_sync_without_leader(
        &self,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<bool, CoordinationError> {
        let (Some(mut found), view) = self.read().await? else { return Ok(false) };
        if view.leader.is_some() || view.revision() != revision {
            return Ok(false);
        }
        lease::set_in_sync(&mut found, members, revision.saturating_add(1));
        Ok(self.write(&found).await?.is_some())
    }

    async fn resign(&self, tenure: LeaderTerm) -> Result<(), CoordinationError> {
        let released = self.change(tenure, |found| {
            lease::release(found, time());
            Ok(LeaseUpdate::Write(()))
        });
        released.await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read() {
        let name = |namespace: &str, name: &str| {
            Some(LeaseName { namespace: namespace.to_owned(), name: name.to_owned() })
        };
        assert_eq!(LeaseName::read("store"), name("default", "store"));
        assert_eq!(LeaseName::read("llm/store.a-1"), name("llm", "store.a-1"));
        for wrong in ["", "/", "a/", "/a", "a/b/c", "etcd:2379", "A", "a_b", "-a", "a..b", "a/b?c"] {
            assert_eq!(LeaseName::read(wrong), None, "{wrong}");
        }
    }
}
