//! A Kubernetes Lease as the coordinator.
//!
//! Every update replaces the Lease with its `resourceVersion`, so that the API server rejects it if the Lease has changed since it was
//! read.

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::config::KubeConfigOptions;
use kube::{Client, Config};
use moongate_kube_lease::{self as kube_lease, LeaseClient};
use tokio::sync::Mutex;

use super::coordinator::{
    Candidacy, CoordinationError, ElectionView, HaCoordinator, InSyncUpdateOutcome, KubernetesLeaseError,
    LeaderTerm,
};
use super::lease;
use super::member::InSyncSet;

/// Attempts of one update after conflicts. Only the holder changes a held Lease, apart from manual edits.
const MAX_ATTEMPTS: usize = 5;
/// Namespace of a Lease without a namespace in its name.
const NAMESPACE: &str = "default";

/// Namespace and name of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    pub namespace: String,
    pub name: String,
}

impl LeaseName {
    /// Parses `NAMESPACE/NAME`, or `NAME` in the namespace `default`, as Mooncake's master does. `None` if it is invalid.
    pub fn read(text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/').unwrap_or((NAMESPACE, text));
        let is_label = |label: &str| {
            let mut letters = label.bytes();
            let is_fine = letters
                .all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == b'-');
            is_fine && !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
        };
        let is_fine = is_label(namespace) && name.len() <= 253 && name.split('.').all(is_label);
        is_fine.then(|| Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

/// Client configuration, from the same sources as Mooncake's master: the pod's service account, the file in `KUBECONFIG`, the user's
/// own kubeconfig.
///
/// # Errors
/// There is no usable configuration.
pub async fn config() -> Result<Config, CoordinationError> {
    if let Ok(config) = Config::incluster() {
        return Ok(config);
    }
    Config::from_kubeconfig(&KubeConfigOptions::default())
        .await
        .map_err(|error| KubernetesLeaseError::Config(error).into())
}

/// Coordinator that stores its state in one Lease.
pub struct LeaseCoordinator {
    client: LeaseClient,
    /// The Lease as this master last wrote it, which saves the read before a renewal. Locked during an update: concurrent renewals and
    /// in-sync updates would only conflict.
    last_written: Mutex<Option<Lease>>,
}

fn failed(error: kube::Error) -> CoordinationError {
    KubernetesLeaseError::Api(error).into()
}

/// Result of a write. `None` if another client was faster: the Lease was changed, created or deleted.
fn written(result: Result<Option<Lease>, kube::Error>) -> Result<Option<Lease>, CoordinationError> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        result => result.map_err(failed),
    }
}

fn time() -> MicroTime {
    MicroTime(Timestamp::now())
}

/// Result of a closure that edits the Lease.
enum LeaseUpdate<T> {
    /// Write the Lease and return this value.
    Write(T),
    /// Write nothing and return this value.
    Unchanged(T),
}

impl LeaseCoordinator {
    /// A client for this Lease, for masters with this lease duration. The client's connections belong to the runtime that this is called
    /// in.
    ///
    /// # Errors
    /// The client configuration is invalid.
    pub fn new(config: Config, name: &LeaseName, lease: Duration) -> Result<Self, CoordinationError> {
        let client = Client::try_from(config).map_err(failed)?;
        let client = LeaseClient::new(client, &name.namespace, &name.name, lease);
        Ok(Self { client, last_written: Mutex::default() })
    }

    /// Reads the Lease and parses the election view.
    async fn read(&self) -> Result<(Option<Lease>, ElectionView), CoordinationError> {
        let Some(observed) = self.client.read().await.map_err(failed)? else {
            return Ok((None, ElectionView::default()));
        };
        let view = lease::view(&observed.lease, observed.is_alive)?;
        Ok((Some(observed.lease), view))
    }

    /// Updates the Lease while this leader holds it. `None` if it does not.
    async fn change<T>(
        &self,
        leader_term: LeaderTerm,
        change: impl Fn(&mut Lease) -> Result<LeaseUpdate<T>, CoordinationError>,
    ) -> Result<Option<T>, CoordinationError> {
        let mut last_written = self.last_written.lock().await;
        for _ in 0..MAX_ATTEMPTS {
            // Taken out: after a conflict the cached Lease is stale.
            let lease = match last_written.take().filter(|lease| lease::is_held(lease, leader_term.term)) {
                Some(cached) => Some(cached),
                None => self.client.read().await.map_err(failed)?.map(|observed| observed.lease),
            };
            let Some(mut lease) = lease.filter(|lease| lease::is_held(lease, leader_term.term)) else {
                return Ok(None);
            };
            match change(&mut lease)? {
                LeaseUpdate::Unchanged(value) => return Ok(Some(value)),
                LeaseUpdate::Write(value) => {
                    *last_written = written(self.client.replace(&lease).await)?;
                    if last_written.is_some() {
                        return Ok(Some(value));
                    }
                }
            }
        }
        Err(KubernetesLeaseError::Conflicts.into())
    }
}

#[async_trait]
impl HaCoordinator for LeaseCoordinator {
    async fn observe(&self) -> Result<ElectionView, CoordinationError> {
        Ok(self.read().await?.1)
    }

    async fn campaign(&self, candidacy: &Candidacy) -> Result<Option<LeaderTerm>, CoordinationError> {
        let (lease, view) = self.read().await?;
        if view.leader.is_some() || view.revision() != candidacy.revision {
            return Ok(None);
        }
        let mut lease = match lease {
            Some(lease) => lease,
            None => {
                let empty = kube_lease::empty(self.client.name());
                match written(self.client.create(&empty).await)? {
                    Some(created) => created,
                    None => return Ok(None),
                }
            }
        };
        let term = lease::acquire(&mut lease, candidacy, time())?;
        let stored = written(self.client.replace(&lease).await)?;
        Ok(stored.map(|_| LeaderTerm { term, lease: term }))
    }

    async fn renew(&self, leader_term: LeaderTerm) -> Result<bool, CoordinationError> {
        let renewed = self.change(leader_term, |lease| {
            kube_lease::renew(lease, time());
            Ok(LeaseUpdate::Write(()))
        });
        Ok(renewed.await?.is_some())
    }

    async fn update_in_sync(
        &self,
        leader_term: LeaderTerm,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<InSyncUpdateOutcome, CoordinationError> {
        let listed = self.change(leader_term, |lease| {
            if lease::view(lease, true)?.revision() != revision {
                return Ok(LeaseUpdate::Unchanged(InSyncUpdateOutcome::Conflict));
            }
            let next = revision.saturating_add(1);
            lease::set_in_sync(lease, members, next);
            Ok(LeaseUpdate::Write(InSyncUpdateOutcome::Stored(next)))
        });
        Ok(listed.await?.unwrap_or(InSyncUpdateOutcome::Deposed))
    }

    async fn update_in_sync_without_leader(
        &self,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<bool, CoordinationError> {
        let (Some(mut lease), view) = self.read().await? else { return Ok(false) };
        if view.leader.is_some() || view.revision() != revision {
            return Ok(false);
        }
        lease::set_in_sync(&mut lease, members, revision.saturating_add(1));
        Ok(written(self.client.replace(&lease).await)?.is_some())
    }

    async fn resign(&self, leader_term: LeaderTerm) -> Result<(), CoordinationError> {
        let released = self.change(leader_term, |lease| {
            lease::release(lease, time());
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
    fn lease_names_are_parsed() {
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
