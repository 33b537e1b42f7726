//! Interface of the external coordination service (etcd or a Kubernetes Lease) that all masters reach. Its updates are linearizable.

use std::error::Error;
use std::time::Duration;

use async_trait::async_trait;
use http::StatusCode;
use kube::config::KubeconfigError;

use super::member::{HaMember, InSyncSet};
use super::tls::HaTlsError;

/// The elected leader, as stored by the coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElectedLeader {
    /// Address at which it serves RPCs.
    pub address: String,
    /// Address of its replication port. `None` if the leader is Mooncake's master, which does not set it.
    pub replication: Option<String>,
    /// Increases with every elected leader.
    pub term: i64,
}

/// Snapshot of the election state in the coordinator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ElectionView {
    /// `None` if no lease is held.
    pub leader: Option<ElectedLeader>,
    /// Members that may become leader, and the revision of this set. `None` before the first leader was elected.
    pub in_sync: Option<(InSyncSet, i64)>,
}

impl ElectionView {
    /// The revision of the in-sync set, 0 if there is none.
    pub fn revision(&self) -> i64 {
        self.in_sync.as_ref().map_or(0, |(_, revision)| *revision)
    }
}

/// A request to become leader. It succeeds if there is no leader and the in-sync set still has this revision; the in-sync set then
/// contains only the new leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidacy {
    pub member: HaMember,
    /// Address of the candidate's replication port.
    pub replication: String,
    /// Revision of the in-sync set that the candidate last observed, 0 for none.
    pub revision: i64,
    /// Lease duration: without a renewal in this time, the coordinator drops the leader.
    pub lease: Duration,
}

/// A held leadership: it lasts as long as the lease is renewed in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaderTerm {
    /// The leader's term; also the first revision of its in-sync set.
    pub term: i64,
    /// Id of the lease in the coordinator.
    pub lease: i64,
}

/// Result of an update of the in-sync set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InSyncUpdateOutcome {
    /// The set was stored and now has this revision.
    Stored(i64),
    /// Another update was stored first; the current set has to be read again.
    Conflict,
    /// This master is no longer the leader.
    Deposed,
}

/// The coordinator did not reply, or sent an invalid reply. The operation may have been executed or not.
#[derive(Debug, thiserror::Error)]
pub enum CoordinationError {
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error(transparent)]
    Lease(#[from] KubernetesLeaseError),
}

/// Why etcd cannot be used as the coordinator.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    #[error("no etcd endpoint is configured")]
    NoEndpoint,
    #[error("`{0}` is not an etcd endpoint; write HOST:PORT (https:// needs --etcd_ca)")]
    InvalidEndpoint(String),
    #[error(transparent)]
    Tls(#[from] HaTlsError),
    /// The endpoint did not respond.
    #[error("etcd at {endpoint}: {source}")]
    Request { endpoint: String, source: EtcdRequestError },
    #[error("etcd at {endpoint} returned {status}: {excerpt}")]
    Status {
        endpoint: String,
        status: StatusCode,
        /// Start of the body.
        excerpt: String,
    },
    /// The response is not etcd's JSON.
    #[error("{endpoint} sent an invalid response: {source}")]
    Malformed { endpoint: String, source: serde_json::Error },
    #[error("etcd sent an invalid number: `{0}`")]
    Number(String),
    #[error("etcd sent an invalid base64 value")]
    Base64,
    #[error("the value of a key in etcd is not UTF-8")]
    NotUtf8,
    #[error("{key} in etcd has an unknown format")]
    InSyncFormat { key: String },
}

/// Why an endpoint of etcd did not respond.
#[derive(Debug, thiserror::Error)]
pub enum EtcdRequestError {
    #[error("{}", chain(.0))]
    Invalid(#[from] http::Error),
    #[error("{}", chain(.0))]
    Exchange(#[from] hyper_util::client::legacy::Error),
    /// The body broke off, or exceeds the limit.
    #[error("{}", chain(&**.0))]
    Body(#[source] Box<dyn Error + Send + Sync>),
    #[error("request timed out")]
    TimedOut,
}

/// Why a Kubernetes Lease cannot be used as the coordinator.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesLeaseError {
    #[error("no usable Kubernetes configuration: {0}")]
    Config(#[source] KubeconfigError),
    #[error("{}", describe(.0))]
    Api(#[source] kube::Error),
    #[error("the Lease has an unknown {0}")]
    UnknownFormat(&'static str),
    #[error("too many conflicting updates of the Lease")]
    Conflicts,
}

/// An error with its causes: hyper's top-level message alone does not name the cause.
fn chain(error: &dyn Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn describe(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => {
            format!("the Kubernetes API returned {}: {}", status.code, status.message)
        }
        error => format!("Kubernetes API: {error}"),
    }
}

/// Leader election and the in-sync set, kept by an external service.
#[async_trait]
pub trait HaCoordinator: Send + Sync + 'static {
    /// Reads the current leader and the in-sync set.
    ///
    /// # Errors
    /// [`CoordinationError`], as for all methods.
    async fn observe(&self) -> Result<ElectionView, CoordinationError>;

    /// Tries to become leader. `None` if another candidate won. The lease starts no earlier than this call.
    ///
    /// # Errors
    /// As above.
    async fn campaign(&self, candidacy: &Candidacy) -> Result<Option<LeaderTerm>, CoordinationError>;

    /// Restarts the lease's time, no earlier than this call. Returns false if the lease no longer exists.
    ///
    /// # Errors
    /// As above.
    async fn renew(&self, leader_term: LeaderTerm) -> Result<bool, CoordinationError>;

    /// Stores the in-sync set if this master is still the leader and the set still has this revision: the revision keeps a delayed
    /// update from overwriting a later one.
    ///
    /// # Errors
    /// As above.
    async fn update_in_sync(
        &self,
        leader_term: LeaderTerm,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<InSyncUpdateOutcome, CoordinationError>;

    /// Stores the in-sync set if there is no leader and the set still has this revision. Returns whether both held.
    ///
    /// # Errors
    /// As above.
    async fn update_in_sync_without_leader(
        &self,
        revision: i64,
        members: &InSyncSet,
    ) -> Result<bool, CoordinationError>;

    /// Releases the lease before it expires.
    ///
    /// # Errors
    /// As above.
    async fn resign(&self, leader_term: LeaderTerm) -> Result<(), CoordinationError>;
}
