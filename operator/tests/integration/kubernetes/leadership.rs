//! Leader election between replicas of the operator.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use moongate_operator::controllers::OperatorError;
use moongate_operator::{OperatorMetrics, OperatorOptions};
use moongate_runtime::Supervisor;
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::json;
use tokio::task::JoinHandle;

use super::proxy::{ApiServerFault, FaultProxy};
use super::{eventually, group, install, role, settled};

const LEASE_DURATION: Duration = Duration::from_secs(5);

struct OperatorReplica {
    metrics: Arc<OperatorMetrics>,
    supervisor: Supervisor,
    operator: JoinHandle<Result<(), OperatorError>>,
}

impl OperatorReplica {
    fn start(kubeconfig: PathBuf, namespace: &TestNamespace) -> Self {
        let (metrics, supervisor) = (Arc::<OperatorMetrics>::default(), Supervisor::new());
        let options = OperatorOptions {
            kubeconfig: Some(kubeconfig),
            namespace: Some(namespace.name.clone()),
            lease: Some((namespace.name.clone(), "operator".to_owned())),
            lease_duration: LEASE_DURATION,
            metrics: Arc::clone(&metrics),
            ..OperatorOptions::default()
        };
        let operator = tokio::spawn({
            let supervisor = supervisor.clone();
            async move { moongate_operator::run(options, &supervisor).await }
        });
        Self { metrics, supervisor, operator }
    }

    fn is_leading(&self) -> bool {
        self.metrics.text().lines().any(|line| line == "moongate_operator_leading 1")
    }

    async fn wait_until_leading(&self) {
        eventually("the replica leads", async || self.is_leading().then_some(())).await;
    }

    async fn stop(self) {
        self.supervisor.token().cancel();
        self.operator.await.unwrap().unwrap();
    }

    /// Ends the replica without a release of its Lease.
    fn kill(self) {
        self.operator.abort();
        self.supervisor.token().cancel();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_replica_leads_until_it_stops_or_its_lease_expires() {
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace("leadership").await.unwrap();
    install(&namespace.client).await;
    let lease = async || -> LeaseSpec {
        let leases = Api::<Lease>::default_namespaced(namespace.client.clone());
        leases.get("operator").await.unwrap().spec.unwrap()
    };
    let first = OperatorReplica::start(plane.kubeconfig(), &namespace);
    first.wait_until_leading().await;
    let acquired = lease().await;
    let second = OperatorReplica::start(plane.kubeconfig(), &namespace);
    tokio::time::sleep(LEASE_DURATION * 2).await;
    assert!(first.is_leading() && !second.is_leading());
    let renewed = lease().await;
    assert!(renewed.renew_time > acquired.renew_time);
    assert_eq!(LeaseSpec { renew_time: acquired.renew_time.clone(), ..renewed }, acquired);
    assert_eq!((acquired.lease_duration_seconds, acquired.lease_transitions), (Some(5), Some(0)));

    first.stop().await;
    let stopped = Instant::now();
    second.wait_until_leading().await;
    assert!(stopped.elapsed() < LEASE_DURATION, "the first replica has released the Lease");

    let third = OperatorReplica::start(plane.kubeconfig(), &namespace);
    tokio::time::sleep(LEASE_DURATION / 2).await;
    second.kill();
    let killed = Instant::now();
    third.wait_until_leading().await;
    assert!(killed.elapsed() > LEASE_DURATION / 2, "the Lease had to expire");
    assert_eq!(lease().await.lease_transitions, Some(2));
    third.stop().await;
    assert_eq!(lease().await.holder_identity.as_deref(), Some(""));
    namespace.delete().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_stays_under_overload_and_ends_without_responses() {
    const OVERLOAD: Duration = Duration::from_secs(15);
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace("overload").await.unwrap();
    let client = namespace.client.clone();
    install(&client).await;
    let _kubelet =
        FakeKubelet::start(client.clone(), &namespace.name, KubeletTimings::default()).await.unwrap();
    let proxy = FaultProxy::start(client.clone()).await;
    proxy.overload(30, 5);
    let first = OperatorReplica::start(proxy.kubeconfig(plane.logs()), &namespace);
    first.wait_until_leading().await;
    let second = OperatorReplica::start(plane.kubeconfig(), &namespace);
    let overloaded = Instant::now();
    // Other requests must not delay those for the Lease.
    let groups: Api<RoleBasedGroup> = Api::default_namespaced(client.clone());
    groups.create(&PostParams::default(), &group(json!([role("a", 4, "engine:0")]))).await.unwrap();
    let mut version = 0;
    while overloaded.elapsed() < OVERLOAD {
        tokio::time::sleep(Duration::from_secs(1)).await;
        version += 1;
        let roles = json!([role("a", 4, &format!("engine:{version}"))]);
        let image = Patch::Merge(json!({ "spec": { "roles": roles } }));
        groups.patch("g", &PatchParams::default(), &image).await.unwrap();
        assert!(first.is_leading() && !second.is_leading(), "after {:?}", overloaded.elapsed());
    }
    eprintln!("{} requests, {:?}", proxy.requests(), proxy.faults());
    assert!(proxy.faults()[&ApiServerFault::TooMany] > 5 && proxy.faults()[&ApiServerFault::Hanging] > 0);

    proxy.be_silent(true);
    let silent = Instant::now();
    let ended = first.operator.await.unwrap();
    assert!(matches!(ended, Err(OperatorError::Lease(_))), "{ended:?}");
    let stopped = silent.elapsed();
    second.wait_until_leading().await;
    let taken = silent.elapsed();
    // Two thirds of the Lease's duration; another replica waits for the whole duration.
    assert!(stopped < LEASE_DURATION * 4 / 5, "{stopped:?}");
    assert!((stopped..LEASE_DURATION * 2).contains(&taken), "{taken:?}");
    first.supervisor.token().cancel();
    settled(&groups).await;
    second.stop().await;
    namespace.delete().await.unwrap();
}
