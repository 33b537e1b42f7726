//! The leader's pod carries a label, so that a Kubernetes Service can lead clients to it that know nothing of Leases.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as PodObject;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Config};
use serde_json::json;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::coordinator::CoordinationError;
use super::node::HaNodeStatus;

/// The label and its value, those of Mooncake's master.
const LABEL: &str = "mooncake.io/store-role";
const LEADER: &str = "leader";
/// Pause before a change that failed is tried again, and how long one may take.
const RETRY: Duration = Duration::from_secs(1);

/// The pod that a master runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name there.
    pub name: String,
}

/// The label of one pod.
pub(super) struct PodLabeler {
    pods: Api<PodObject>,
    name: String,
}

impl PodLabeler {
    /// That of this pod. The client's connections belong to the runtime that this is called in.
    pub(super) fn new(config: Config, pod: &PodName) -> Result<Self, CoordinationError> {
        let client = Client::try_from(config).map_err(|error| CoordinationError(error.to_string()))?;
        Ok(Self { pods: Api::namespaced(client, &pod.namespace), name: pod.name.clone() })
    }

    /// Sets it while the master serves and removes it else, until `stop`; at first too, because an earlier life of the master may have
    /// left it.
    pub(super) async fn run(self, shown: Arc<HaNodeStatus>, stop: CancellationToken) {
        let mut serves = shown.serves.subscribe();
        loop {
            let leads = *serves.borrow_and_update();
            let is_set = self.set(leads).await;
            tokio::select! {
                () = stop.cancelled() => break,
                _ = serves.changed() => {}
                () = sleep(RETRY), if !is_set => {}
            }
        }
        self.set(false).await;
    }

    /// Sets or removes it. Returns whether that was done.
    async fn set(&self, leads: bool) -> bool {
        let patch = json!({ "metadata": { "labels": { LABEL: leads.then_some(LEADER) } } });
        let (how, patch) = (PatchParams::default(), Patch::Merge(patch));
        match timeout(RETRY, self.pods.patch_metadata(&self.name, &how, &patch)).await {
            Ok(Ok(_)) => return true,
            Ok(Err(error)) => {
                tracing::warn!(%error, pod = self.name, leads, "the pod's label cannot be changed");
            }
            Err(_) => tracing::warn!(pod = self.name, leads, "the pod's label cannot be changed in time"),
        }
        false
    }
}
