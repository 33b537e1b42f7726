//! Sets a label on the leader's pod, so that a Kubernetes Service can select it for clients that do not read the Lease.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as PodObject;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Config};
use serde_json::json;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::coordinator::KubernetesLeaseError;
use super::node::HaNodeStatus;

/// Label and value, the same as Mooncake's master sets.
const LABEL: &str = "mooncake.io/store-role";
const LEADER: &str = "leader";
/// Retry delay and timeout of one label update.
const RETRY: Duration = Duration::from_secs(1);

/// Namespace and name of the pod that a master runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
}

/// Sets and removes the label of one pod.
pub(crate) struct PodLabeler {
    pods: Api<PodObject>,
    name: String,
}

impl PodLabeler {
    /// A labeler of this pod. The client's connections belong to the runtime that this is called in.
    pub(crate) fn new(config: Config, pod: &PodName) -> Result<Self, KubernetesLeaseError> {
        let client = Client::try_from(config).map_err(KubernetesLeaseError::Api)?;
        Ok(Self { pods: Api::namespaced(client, &pod.namespace), name: pod.name.clone() })
    }

    /// Sets the label while the master serves and removes it otherwise, until `stop`. It is also written at the start: an earlier process
    /// in this pod may have left it set.
    pub(crate) async fn run(self, status: Arc<HaNodeStatus>, stop: CancellationToken) {
        let mut serves = status.serves.subscribe();
        loop {
            let is_leader = *serves.borrow_and_update();
            let is_set = self.set(is_leader).await;
            tokio::select! {
                () = stop.cancelled() => break,
                _ = serves.changed() => {}
                () = sleep(RETRY), if !is_set => {}
            }
        }
        self.set(false).await;
    }

    /// Sets or removes the label. Returns whether that succeeded.
    async fn set(&self, is_leader: bool) -> bool {
        let patch = json!({ "metadata": { "labels": { LABEL: is_leader.then_some(LEADER) } } });
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        match timeout(RETRY, self.pods.patch_metadata(&self.name, &params, &patch)).await {
            Ok(Ok(_)) => return true,
            Ok(Err(error)) => {
                tracing::warn!(%error, pod = self.name, is_leader, "cannot change the pod's label");
            }
            Err(_) => tracing::warn!(pod = self.name, is_leader, "timed out changing the pod's label"),
        }
        false
    }
}
