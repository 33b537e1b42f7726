//! A namespace with a kubelet and an operator, on the control plane that these tests share.

use std::sync::Arc;

use kube::Client;
use kube::api::{Api, ListParams};
use moongate_operator::{GangScheduler, OperatorMetrics, OperatorOptions};
use moongate_runtime::Supervisor;
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, NoopRuntime, PodRuntime, TestNamespace};
use tokio::task::JoinHandle;

use super::eventually;

pub(crate) struct TestOperator {
    pub(crate) client: Client,
    pub(crate) namespace: TestNamespace,
    pub(crate) metrics: Arc<OperatorMetrics>,
    supervisor: Supervisor,
    operator: JoinHandle<()>,
    pub(crate) kubelet: Option<FakeKubelet>,
}

impl TestOperator {
    pub(crate) async fn begin(name: &str) -> Self {
        Self::begin_on(&ControlPlane::shared().await.unwrap(), name).await
    }

    pub(crate) async fn begin_on(plane: &ControlPlane, name: &str) -> Self {
        Self::begin_with(plane, name, NoopRuntime).await
    }

    /// Starts with a runtime for the containers of pods.
    pub(crate) async fn begin_with(plane: &ControlPlane, name: &str, runtime: impl PodRuntime) -> Self {
        Self::begin_as(plane, name, runtime, GangScheduler::default()).await
    }

    /// Starts with a runtime, and for a scheduler of gangs.
    pub(crate) async fn begin_as(
        plane: &ControlPlane,
        name: &str,
        runtime: impl PodRuntime,
        gang_scheduler: GangScheduler,
    ) -> Self {
        let namespace = plane.namespace(name).await.unwrap();
        let client = namespace.client.clone();
        super::install(&client).await;
        let kubelet = FakeKubelet::run(client.clone(), &namespace.name, KubeletTimings::default(), runtime)
            .await
            .unwrap();
        let supervisor = Supervisor::new();
        let metrics = Arc::<OperatorMetrics>::default();
        let options = OperatorOptions {
            kubeconfig: Some(plane.kubeconfig()),
            namespace: Some(namespace.name.clone()),
            metrics: Arc::clone(&metrics),
            gang_scheduler,
            ..OperatorOptions::default()
        };
        let operator = tokio::spawn({
            let supervisor = supervisor.clone();
            async move { moongate_operator::run(options, &supervisor).await.unwrap() }
        });
        Self { client, namespace, metrics, supervisor, operator, kubelet: Some(kubelet) }
    }

    pub(crate) fn api<T>(&self) -> Api<T>
    where
        T: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::default_namespaced(self.client.clone())
    }

    /// Waits until no object of the kind exists.
    pub(crate) async fn wait_until_none<T>(&self)
    where
        T: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
        T: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        eventually("all objects are deleted", async || {
            let left = self.api::<T>().list(&ListParams::default()).await.unwrap().items;
            left.is_empty().then_some(())
        })
        .await;
    }

    pub(crate) async fn end(self) {
        self.supervisor.token().cancel();
        self.operator.await.unwrap();
        self.namespace.delete().await.unwrap();
    }
}
