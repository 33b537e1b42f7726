//! A Lease of a real API server as the store that masters decide with.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use moongate_master::ha::{
    Candidacy, HaCoordinator, HaMember, InSyncSet, InSyncUpdateOutcome, LeaderTerm, LeaseCoordinator,
    LeaseName,
};
use moongate_testkit::{ControlPlane, TestNamespace};
use serde_json::json;

/// Long, because it only says when a test hangs.
const LIMIT: Duration = Duration::from_secs(60);
const HELD: Duration = Duration::from_secs(2);

struct LeaseTestCluster {
    namespace: TestNamespace,
    plane: std::sync::Arc<ControlPlane>,
}

impl LeaseTestCluster {
    async fn start() -> Self {
        let plane = ControlPlane::shared().await.unwrap();
        Self { namespace: plane.namespace("lease").await.unwrap(), plane }
    }

    /// One that has seen nothing yet.
    async fn another(&self) -> LeaseCoordinator {
        let config = self.plane.config(&self.namespace.name).await.unwrap();
        let name = LeaseName::read(&format!("{}/store", self.namespace.name)).unwrap();
        LeaseCoordinator::new(config, &name, HELD).unwrap()
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

fn bid(address: &str, revision: i64) -> Candidacy {
    Candidacy { member: member(address), replication: format!("{address}:r"), revision, lease: HELD }
}

fn members(addresses: &[&str]) -> InSyncSet {
    addresses.iter().map(|address| member(address)).collect()
}

async fn leader(store: &LeaseCoordinator) -> Option<(String, i64)> {
    store.observe().await.unwrap().leader.map(|it| (it.address, it.term))
}

/// Waits until this one takes the leader for gone.
async fn until_nobody_leads(store: &LeaseCoordinator) {
    let begun = Instant::now();
    while leader(store).await.is_some() {
        assert!(begun.elapsed() < LIMIT, "the leader is not given up");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn one_leads_until_it_is_silent() {
    let masters = LeaseTestCluster::start().await;
    let (a, b) = (masters.another().await, masters.another().await);
    assert_eq!(a.observe().await.unwrap(), b.observe().await.unwrap());
    assert_eq!(a.observe().await.unwrap().leader, None);
    // At the same time: one wins.
    let (first, second) = (bid("a:1", 0), bid("b:1", 0));
    let (won, lost) = tokio::join!(a.campaign(&first), b.campaign(&second));
    let (won, lost) = (won.unwrap(), lost.unwrap());
    assert_ne!(won.is_some(), lost.is_some(), "{won:?} {lost:?}");
    let (store, other, me, tenure) = match (won, lost) {
        (Some(tenure), _) => (&a, &b, "a:1", tenure),
        (_, tenure) => (&b, &a, "b:1", tenure.unwrap()),
    };
    assert_eq!(leader(other).await, Some((me.to_owned(), tenure.term)));
    let view = other.observe().await.unwrap();
    assert_eq!(view.in_sync, Some((members(&[me]), tenure.term)));
    assert_eq!(view.leader.unwrap().replication, Some(format!("{me}:r")));
    assert_eq!(masters.lease().await.spec.unwrap().holder_identity.as_deref(), Some(me));

    // Renewed, it stays; others do not get in between.
    let begun = Instant::now();
    while begun.elapsed() < 2 * HELD {
        assert!(store.renew(tenure).await.unwrap());
        assert_eq!(leader(other).await, Some((me.to_owned(), tenure.term)));
        assert!(store.renew(tenure).await.unwrap());
        assert_eq!(other.campaign(&bid("c:1", tenure.term)).await.unwrap(), None);
    }
    // Silent, it is gone, but never before its time.
    let silent = Instant::now();
    assert!(store.renew(tenure).await.unwrap());
    until_nobody_leads(other).await;
    assert!(silent.elapsed() >= HELD);
    // One that has just come has not watched the silence.
    assert!(leader(&masters.another().await).await.is_some());
    assert_eq!(other.campaign(&bid("c:1", 0)).await.unwrap(), None, "with an old view");
    let next = other.campaign(&bid("c:1", tenure.term)).await.unwrap().unwrap();
    assert!(next.term > tenure.term);
    assert!(!store.renew(tenure).await.unwrap(), "another leads");
    assert_eq!(
        store.update_in_sync(tenure, next.term, &members(&[me])).await.unwrap(),
        InSyncUpdateOutcome::Deposed
    );
    store.resign(tenure).await.unwrap();
    assert_eq!(leader(store).await, Some(("c:1".to_owned(), next.term)), "it was not its own to give back");
}

#[tokio::test]
async fn who_may_lead_next_changes_step_by_step() {
    let masters = LeaseTestCluster::start().await;
    let (a, b) = (masters.another().await, masters.another().await);
    let tenure = a.campaign(&bid("a:1", 0)).await.unwrap().unwrap();
    let both = members(&["a:1", "b:1"]);
    let InSyncUpdateOutcome::Stored(revision) = a.update_in_sync(tenure, tenure.term, &both).await.unwrap()
    else {
        panic!("nobody else has changed it")
    };
    assert_eq!(b.observe().await.unwrap().in_sync, Some((both.clone(), revision)));
    assert_eq!(
        a.update_in_sync(tenure, tenure.term, &members(&["a:1"])).await.unwrap(),
        InSyncUpdateOutcome::Conflict,
        "an old attempt"
    );
    assert!(a.renew(tenure).await.unwrap());
    assert!(!b.update_in_sync_without_leader(revision, &members(&["a:1"])).await.unwrap(), "somebody leads");
    // Renewals and lists at the same time: all succeed.
    let renew = async {
        for _ in 0..20 {
            assert!(a.renew(tenure).await.unwrap());
        }
    };
    let list = async {
        let mut at = revision;
        for _ in 0..20 {
            let InSyncUpdateOutcome::Stored(next) = a.update_in_sync(tenure, at, &both).await.unwrap() else {
                panic!("at {at}")
            };
            assert!(next > at);
            at = next;
        }
        at
    };
    let ((), revision) = tokio::join!(renew, list);
    // Somebody else's annotation changes nothing.
    let patch = Patch::Merge(json!({ "metadata": { "annotations": { "note": "x" } } }));
    masters.leases().patch("store", &PatchParams::default(), &patch).await.unwrap();
    assert!(a.renew(tenure).await.unwrap());

    a.resign(tenure).await.unwrap();
    assert_eq!(leader(&b).await, None, "at once");
    assert!(!a.renew(tenure).await.unwrap());
    assert!(
        !b.update_in_sync_without_leader(revision - 1, &members(&["b:1"])).await.unwrap(),
        "with an old view"
    );
    assert!(b.update_in_sync_without_leader(revision, &members(&["b:1"])).await.unwrap());
    let (in_sync, changed) = b.observe().await.unwrap().in_sync.unwrap();
    assert_eq!(in_sync, members(&["b:1"]));
    let next = b.campaign(&bid("b:1", changed)).await.unwrap().unwrap();
    assert!(next.term > changed && changed > revision, "no revision comes again");
}

#[tokio::test]
async fn a_lease_that_is_deleted_deposes() {
    let masters = LeaseTestCluster::start().await;
    let store = masters.another().await;
    let tenure = store.campaign(&bid("a:1", 0)).await.unwrap().unwrap();
    let transitions = masters.lease().await.spec.unwrap().lease_transitions.unwrap();
    assert_eq!(tenure, LeaderTerm { term: i64::from(transitions), lease: tenure.lease });
    masters.leases().delete("store", &DeleteParams::default()).await.unwrap();
    assert!(!store.renew(tenure).await.unwrap());
    assert_eq!(store.observe().await.unwrap(), moongate_master::ha::ElectionView::default());
    // The API server counts the time in which a Lease was made in seconds.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let next = store.campaign(&bid("b:1", 0)).await.unwrap().unwrap();
    assert!(next.term > tenure.term);
}
