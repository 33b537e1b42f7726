//! Containers as their kubelet remembers them, and as a pod's status tells of them.

use k8s_openapi::api::core::v1::{Container as Spec, ContainerStatus, PodReadinessGate, PodStatus};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{ContainerHealth, KubeletTimings};

#[derive(Default)]
pub(super) struct FakeContainer {
    image: String,
    image_id: String,
    restarts: i32,
    /// From when on it runs.
    ready_at: Option<Instant>,
}

impl FakeContainer {
    /// What a status says ran before this kubelet.
    pub(super) fn from_status(status: &ContainerStatus) -> Self {
        Self {
            image: status.image.clone(),
            image_id: status.image_id.clone(),
            restarts: status.restart_count,
            ready_at: None,
        }
    }

    /// Whether it runs another image than it is to run.
    pub(super) fn is_outdated(&self, image: &str) -> bool {
        !self.image.is_empty() && self.image != image
    }

    /// Starts it, or starts it again if its image has changed. Answers when it will be up, if it is not.
    pub(super) fn reconcile(&mut self, image: &str, now: Instant, pace: KubeletTimings) -> Option<Instant> {
        if self.image != image {
            self.ready_at = Some(now);
            if !self.image.is_empty() {
                self.ready_at = Some(now + pace.restart);
                self.restarts += 1;
            }
            image.clone_into(&mut self.image);
        }
        if let Some(up) = self.ready_at
            && up <= now
        {
            self.ready_at = None;
            self.image_id = format!("sha256:{image}");
        }
        self.ready_at
    }

    pub(super) fn status(&self, name: &str, state: ContainerHealth) -> Value {
        let is_up = self.ready_at.is_none() && state.is_running;
        let reason = if self.ready_at.is_none() { "CrashLoopBackOff" } else { "ContainerCreating" };
        let waiting = json!({ "waiting": { "reason": reason }, "running": null });
        let shown = if is_up { json!({ "running": {}, "waiting": null }) } else { waiting };
        json!({ "name": name, "image": self.image, "imageID": self.image_id, "ready": is_up && state.is_ready,
            "started": is_up, "restartCount": self.restarts + state.exit_count, "state": shown })
    }
}

/// The status of a container of a pod that ends by itself: it has done so at once, or could not begin for want of a shell, or
/// waits for an image that is absent.
pub(super) fn completed_status(container: &Spec) -> Value {
    let image = container.image.as_deref().unwrap_or_default();
    if image.starts_with("absent") {
        return json!({ "name": container.name, "image": image, "imageID": "", "ready": false, "restartCount": 0,
            "state": { "waiting": { "reason": "ImagePullBackOff" } } });
    }
    let (reason, code) = if image.starts_with("shell-less") { ("StartError", 128) } else { ("Completed", 0) };
    json!({ "name": container.name, "image": image, "imageID": format!("sha256:{image}"), "ready": false,
        "restartCount": 0, "state": { "terminated": { "reason": reason, "exitCode": code } } })
}

/// The pod's conditions, if these or its containers are not what its status says.
pub(super) fn changed_conditions<'a>(
    live: Option<&PodStatus>,
    containers: &[Value],
    mut gates: impl Iterator<Item = &'a PodReadinessGate>,
) -> Option<Vec<Value>> {
    let is = |kind: &str| {
        let mut conditions = live.iter().flat_map(|live| live.conditions.iter().flatten());
        conditions.find(|one| one.type_ == kind).map(|one| one.status == "True")
    };
    let up = containers.iter().all(|container| container["ready"] == true);
    let ready = up && gates.all(|gate| is(&gate.condition_type) == Some(true));
    let all = [("PodScheduled", true), ("Initialized", true), ("ContainersReady", up), ("Ready", ready)];
    let new = all.into_iter().filter(|(kind, truth)| is(kind) != Some(*truth)).map(|(kind, truth)| {
        json!({ "type": kind, "status": if truth { "True" } else { "False" },
            "lastTransitionTime": format!("{:.0}", Timestamp::now()) })
    });
    let new: Vec<Value> = new.collect();
    let said = live.and_then(|live| live.container_statuses.as_deref()).unwrap_or_default();
    let is_said = said.len() == containers.len()
        && said.iter().zip(containers).all(|(said, container)| {
            container["ready"] == said.ready
                && container["imageID"] == said.image_id.as_str()
                && container["restartCount"] == said.restart_count
        });
    (!is_said || !new.is_empty()).then_some(new)
}
