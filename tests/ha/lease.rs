//! A Lease that masters settle with who leads, and the Service that leads clients to the leader's pod.
#![expect(clippy::disallowed_methods, reason = "tests have no shutdown")]

use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease as LeaseObject;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ListParams, PostParams};
use moongate_testkit::{ControlPlane, TestNamespace};
use serde_json::{from_value, json};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

const NAME: &str = "store";
const LABEL: &str = "mooncake.io/store-role=leader";

/// A Lease, and pods that stand for the masters.
pub(crate) struct LeaseElection {
    plane: Arc<ControlPlane>,
    namespace: TestNamespace,
    service: String,
}

impl LeaseElection {
    /// For masters at these addresses.
    pub(crate) async fn start(masters: &[String]) -> Self {
        let plane = ControlPlane::shared().await.unwrap();
        let namespace = plane.namespace("masters").await.unwrap();
        let pods = Api::<Pod>::default_namespaced(namespace.client.clone());
        for number in 0..masters.len() {
            let pod = json!({
                "metadata": { "name": format!("master-{number}") },
                "spec": { "containers": [{ "name": "master", "image": "moongate" }] },
            });
            pods.create(&PostParams::default(), &from_value(pod).unwrap()).await.unwrap();
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let service = listener.local_addr().unwrap().to_string();
        tokio::spawn(serve(listener, pods, masters.to_vec()));
        Self { plane, namespace, service }
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.plane.kubeconfig()
    }

    /// Flags of a master that uses it.
    pub(crate) fn flags(&self, master: usize) -> String {
        let namespace = &self.namespace.name;
        format!(
            "--ha_backend_type=k8s --ha_backend_connstring={namespace}/{NAME} --pod_name=master-{master} \
             --pod_namespace={namespace}"
        )
    }

    /// Where clients reach whoever leads.
    pub(crate) fn service(&self) -> String {
        self.service.clone()
    }

    async fn object(&self) -> Option<LeaseObject> {
        Api::default_namespaced(self.namespace.client.clone()).get_opt(NAME).await.unwrap()
    }

    /// The address of the master that holds it.
    pub(crate) async fn holder(&self) -> Option<String> {
        self.object().await?.spec?.holder_identity
    }

    /// Who may lead next, one a line.
    pub(crate) async fn in_sync(&self) -> Option<String> {
        self.object().await?.metadata.annotations?.remove("moongate.io/in-sync")
    }

    /// The masters whose pods have the leader's label.
    pub(crate) async fn leaders(&self) -> Vec<usize> {
        labelled(&Api::default_namespaced(self.namespace.client.clone())).await
    }
}

async fn labelled(pods: &Api<Pod>) -> Vec<usize> {
    let found = pods.list(&ListParams::default().labels(LABEL)).await.unwrap();
    let number = |pod: &Pod| pod.metadata.name.as_ref()?.strip_prefix("master-")?.parse().ok();
    found.items.iter().filter_map(number).collect()
}

/// What a Service with the leader's label as its selector does: a connection goes to a pod that has it. Pods that do not respond
/// are not ready and therefore not in a Service, so the first pod that responds receives the connection.
async fn serve(listener: TcpListener, pods: Api<Pod>, masters: Vec<String>) {
    loop {
        let (mut client, _) = listener.accept().await.unwrap();
        let (pods, masters) = (pods.clone(), masters.clone());
        tokio::spawn(async move {
            for leader in labelled(&pods).await {
                if let Ok(mut master) = TcpStream::connect(&masters[leader]).await {
                    let _ = copy_bidirectional(&mut client, &mut master).await;
                    return;
                }
            }
        });
    }
}
