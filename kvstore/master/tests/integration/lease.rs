//! Tests the Lease coordinator against a real API server.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use moongate_master::ha::{
    Candidacy, HaCoordinator, HaMember, InSyncSet, InSyncUpdateOutcome, LeaderTerm, LeaseCoordinator,
    LeaseName,
};
use moongate_store_testkit::LIMIT;
use moongate_testkit::{ControlPlane, TestNamespace};
use serde_json::json;

const LEASE: Duration = Duration::from_secs(2);

struct LeaseTestCluster {
    namespace: TestNamespace,
    plane: std::sync::Arc<ControlPlane>,
}

impl LeaseTestCluster {
    async fn start() -> Self {
        let plane = ControlPlane::shared().await.unwrap();
        Self { namespace: plane.namespace("lease").await.unwrap(), plane }
    }

    /// A coordinator without observations so far.
    async fn new_observer(&self) -> LeaseCoordinator {
        let config = self.plane.config(&self.namespace.name).await.unwrap();
        let name = LeaseName::read(&format!("{}/store", self.namespace.name)).unwrap();
        LeaseCoordinator::new(config, &name, LEASE).unwrap()
    }

    fn leases(&self) -> Api<Lease> {
        Api::default_namespaced(self.namespace.client.clone())
    }

    async fn lease(&self) -> Lease {
        self.leases().get("store").await.unwrap()
    }
}

fn member(address: &str) -> HaMember {
    HaMember { address: address.to_owned(), incarnation: 7 }
}

fn candidacy(address: &str, revision: i64) -> Candidacy {
    Candidacy { member: member(address), replication: format!("{address}:r"), revision, lease: LEASE }
}

fn members(addresses: &[&str]) -> InSyncSet {
    addresses.iter().map(|address| member(address)).collect()
}

async fn leader(store: &LeaseCoordinator) -> Option<(String, i64)> {
    store.observe().await.unwrap().leader.map(|leader| (leader.address, leader.term))
}

/// Waits until this coordinator reports no leader.
async fn wait_for_expiry(store: &LeaseCoordinator) {
    let started = Instant::now();
    while leader(store).await.is_some() {
        assert!(started.elapsed() < LIMIT, "the lease does not expire");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_leader_leads_until_its_lease_expires() {
    let masters = LeaseTestCluster::start().await;
    let (a, b) = (masters.new_observer().await, masters.new_observer().await);
    assert_eq!(a.observe().await.unwrap(), b.observe().await.unwrap());
    assert_eq!(a.observe().await.unwrap().leader, None);
    // Of two concurrent candidates, one wins.
    let (first, second) = (candidacy("a:1", 0), candidacy("b:1", 0));
    let (won, lost) = tokio::join!(a.campaign(&first), b.campaign(&second));
    let (won, lost) = (won.unwrap(), lost.unwrap());
    assert_ne!(won.is_some(), lost.is_some(), "{won:?} {lost:?}");
    let (store, other, address, leader_term) = match (won, lost) {
        (Some(leader_term), _) => (&a, &b, "a:1", leader_term),
        (_, leader_term) => (&b, &a, "b:1", leader_term.unwrap()),
    };
    assert_eq!(leader(other).await, Some((address.to_owned(), leader_term.term)));
    let view = other.observe().await.unwrap();
    assert_eq!(view.in_sync, Some((members(&[address]), leader_term.term)));
    assert_eq!(view.leader.unwrap().replication, Some(format!("{address}:r")));
    assert_eq!(masters.lease().await.spec.unwrap().holder_identity.as_deref(), Some(address));

    // While it is renewed, no other candidate wins.
    let started = Instant::now();
    while started.elapsed() < 2 * LEASE {
        assert!(store.renew(leader_term).await.unwrap());
        assert_eq!(leader(other).await, Some((address.to_owned(), leader_term.term)));
        assert!(store.renew(leader_term).await.unwrap());
        assert_eq!(other.campaign(&candidacy("c:1", leader_term.term)).await.unwrap(), None);
    }
    // Without a renewal it expires, but not early.
    let last_renewal = Instant::now();
    assert!(store.renew(leader_term).await.unwrap());
    wait_for_expiry(other).await;
    assert!(last_renewal.elapsed() >= LEASE);
    // A new observer starts its own expiry time.
    assert!(leader(&masters.new_observer().await).await.is_some());
    assert_eq!(other.campaign(&candidacy("c:1", 0)).await.unwrap(), None, "with an outdated view");
    let next = other.campaign(&candidacy("c:1", leader_term.term)).await.unwrap().unwrap();
    assert!(next.term > leader_term.term);
    assert!(!store.renew(leader_term).await.unwrap(), "another master is the leader");
    assert_eq!(
        store.update_in_sync(leader_term, next.term, &members(&[address])).await.unwrap(),
        InSyncUpdateOutcome::Deposed
    );
    store.resign(leader_term).await.unwrap();
    assert_eq!(
        leader(store).await,
        Some(("c:1".to_owned(), next.term)),
        "it cannot release another leader's lease"
    );
}

#[tokio::test]
async fn in_sync_updates_need_the_current_revision() {
    let masters = LeaseTestCluster::start().await;
    let (a, b) = (masters.new_observer().await, masters.new_observer().await);
    let leader_term = a.campaign(&candidacy("a:1", 0)).await.unwrap().unwrap();
    let both = members(&["a:1", "b:1"]);
    let InSyncUpdateOutcome::Stored(revision) =
        a.update_in_sync(leader_term, leader_term.term, &both).await.unwrap()
    else {
        panic!("no concurrent update")
    };
    assert_eq!(b.observe().await.unwrap().in_sync, Some((both.clone(), revision)));
    assert_eq!(
        a.update_in_sync(leader_term, leader_term.term, &members(&["a:1"])).await.unwrap(),
        InSyncUpdateOutcome::Conflict,
        "a delayed update"
    );
    assert!(a.renew(leader_term).await.unwrap());
    assert!(
        !b.update_in_sync_without_leader(revision, &members(&["a:1"])).await.unwrap(),
        "a leader holds the lease"
    );
    // Concurrent renewals and in-sync updates all succeed.
    let renew = async {
        for _ in 0..20 {
            assert!(a.renew(leader_term).await.unwrap());
        }
    };
    let list = async {
        let mut current = revision;
        for _ in 0..20 {
            let InSyncUpdateOutcome::Stored(next) =
                a.update_in_sync(leader_term, current, &both).await.unwrap()
            else {
                panic!("revision {current}")
            };
            assert!(next > current);
            current = next;
        }
        current
    };
    let ((), revision) = tokio::join!(renew, list);
    // Foreign annotations have no effect.
    let patch = Patch::Merge(json!({ "metadata": { "annotations": { "note": "x" } } }));
    masters.leases().patch("store", &PatchParams::default(), &patch).await.unwrap();
    assert!(a.renew(leader_term).await.unwrap());

    a.resign(leader_term).await.unwrap();
    assert_eq!(leader(&b).await, None, "at once");
    assert!(!a.renew(leader_term).await.unwrap());
    assert!(
        !b.update_in_sync_without_leader(revision - 1, &members(&["b:1"])).await.unwrap(),
        "with an outdated view"
    );
    assert!(b.update_in_sync_without_leader(revision, &members(&["b:1"])).await.unwrap());
    let (in_sync, changed) = b.observe().await.unwrap().in_sync.unwrap();
    assert_eq!(in_sync, members(&["b:1"]));
    let next = b.campaign(&candidacy("b:1", changed)).await.unwrap().unwrap();
    assert!(next.term > changed && changed > revision, "revisions are not reused");
}

#[tokio::test]
async fn a_deleted_lease_deposes_the_leader() {
    let masters = LeaseTestCluster::start().await;
    let store = masters.new_observer().await;
    let leader_term = store.campaign(&candidacy("a:1", 0)).await.unwrap().unwrap();
    let transitions = masters.lease().await.spec.unwrap().lease_transitions.unwrap();
    assert_eq!(leader_term, LeaderTerm { term: i64::from(transitions), lease: leader_term.lease });
    masters.leases().delete("store", &DeleteParams::default()).await.unwrap();
    assert!(!store.renew(leader_term).await.unwrap());
    assert_eq!(store.observe().await.unwrap(), moongate_master::ha::ElectionView::default());
    // Creation timestamps have a resolution of one second.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let next = store.campaign(&candidacy("b:1", 0)).await.unwrap().unwrap();
    assert!(next.term > leader_term.term);
}
