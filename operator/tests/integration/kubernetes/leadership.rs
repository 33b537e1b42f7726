//! Leader election between replicas of the operator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::Api;
use moongate_operator::{OperatorMetrics, OperatorOptions};
use moongate_runtime::Supervisor;
use moongate_testkit::{ControlPlane, TestNamespace};
use tokio::task::JoinHandle;

use super::{eventually, install};

const LEASE_DURATION: Duration = Duration::from_secs(5);

struct OperatorReplica {
    metrics: Arc<OperatorMetrics>,
    supervisor: Supervisor,
    operator: JoinHandle<()>,
}

impl OperatorReplica {
    fn start(plane: &ControlPlane, namespace: &TestNamespace) -> Self {
        let (metrics, supervisor) = (Arc::<OperatorMetrics>::default(), Supervisor::new());
        let options = OperatorOptions {
            kubeconfig: Some(plane.kubeconfig()),
            namespace: Some(namespace.name.clone()),
            lease: Some((namespace.name.clone(), "operator".to_owned())),
            lease_duration: LEASE_DURATION,
            metrics: Arc::clone(&metrics),
            ..OperatorOptions::default()
        };
        let operator = tokio::spawn({
            let supervisor = supervisor.clone();
            async move { moongate_operator::run(options, &supervisor).await.unwrap() }
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
        self.operator.await.unwrap();
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
    let first = OperatorReplica::start(&plane, &namespace);
    first.wait_until_leading().await;
    let acquired = lease().await;
    let second = OperatorReplica::start(&plane, &namespace);
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

    let third = OperatorReplica::start(&plane, &namespace);
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
