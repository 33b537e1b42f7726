//! State of containers at the fake kubelet, and their entries in a pod's status.

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
    /// Time when a starting container runs; `None` once it runs.
    ready_at: Option<Instant>,
}

impl FakeContainer {
    /// State recorded in a status before this kubelet started.
    pub(super) fn from_status(status: &ContainerStatus) -> Self {
        Self {
            image: status.image.clone(),
            image_id: status.image_id.clone(),
            restarts: status.restart_count,
            ready_at: None,
        }
    }

    /// Whether it runs another image than `image`.
    pub(super) fn is_outdated(&self, image: &str) -> bool {
        !self.image.is_empty() && self.image != image
    }

    /// Starts the container, or restarts it if its image changed. Returns when it will run, if it does not run yet.
    pub(super) fn reconcile(
        &mut self,
        image: &str,
        now: Instant,
        timings: KubeletTimings,
    ) -> Option<Instant> {
        if self.image != image {
            self.ready_at = Some(now);
            if !self.image.is_empty() {
                self.ready_at = Some(now + timings.restart);
                self.restarts += 1;
            }
            image.clone_into(&mut self.image);
        }
        if let Some(up) = self.ready_at
            && up <= now
        {
            self.ready_at = None;
            self.image_id = image_id(image);
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

/// The image by its digest, as runtimes report it.
fn image_id(image: &str) -> String {
    if image.contains('@') { image.to_owned() } else { format!("{image}@sha256:{:064}", 0) }
}

/// The status of a container of a pod that runs to completion: it has completed at once, or could not start for lack of a shell, or waits
/// for an absent image.
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

/// The pod's changed conditions, or `None` if the status is already up to date.
pub(super) fn changed_conditions<'a>(
    live: Option<&PodStatus>,
    containers: &[Value],
    mut gates: impl Iterator<Item = &'a PodReadinessGate>,
) -> Option<Vec<Value>> {
    let is = |kind: &str| {
        let mut conditions = live.iter().flat_map(|live| live.conditions.iter().flatten());
        conditions.find(|condition| condition.type_ == kind).map(|condition| condition.status == "True")
    };
    let up = containers.iter().all(|container| container["ready"] == true);
    let ready = up && gates.all(|gate| is(&gate.condition_type) == Some(true));
    let all = [("PodScheduled", true), ("Initialized", true), ("ContainersReady", up), ("Ready", ready)];
    let new = all.into_iter().filter(|(kind, truth)| is(kind) != Some(*truth)).map(|(kind, truth)| {
        json!({ "type": kind, "status": if truth { "True" } else { "False" },
            "lastTransitionTime": format!("{:.0}", Timestamp::now()) })
    });
    let new: Vec<Value> = new.collect();
    let current = live.and_then(|live| live.container_statuses.as_deref()).unwrap_or_default();
    let is_current = current.len() == containers.len()
        && current.iter().zip(containers).all(|(status, container)| {
            container["ready"] == status.ready
                && container["imageID"] == status.image_id.as_str()
                && container["restartCount"] == status.restart_count
        });
    (!is_current || !new.is_empty()).then_some(new)
}
