//! Pulls images to the nodes of an instance's pods before these restart in place. Meanwhile the pods serve.
//!
//! Progress is stored in the instance's condition `PullingImages`, so that any later plan can continue. Its transition time
//! starts the
//! timeout, even where no pull pod can be created.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{LocalObjectReference, Pod};
use k8s_openapi::jiff::Timestamp;
use moongate_render::pre_pull::{self as render, ContainerImage};
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleInstance, RoleInstanceStatus};
use serde_json::json;

use super::instance::{InstanceInput, component_of};
use super::{PlanError, ReconcilePlan, WriteAction, in_place, revisions, warmup};
use crate::status::{self, CANNOT_PULL, FOR_IMAGES, WaitCondition, pod_has, pod_label, set_waiting};
use crate::time::add_duration;

/// Default of the pull timeout.
const TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Upper bound of the pull timeout.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
/// Waiting reasons of a container whose image cannot be pulled.
const PULL_FAILURE_REASONS: [&str; 5] =
    ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"];

/// Stage of an instance's image pull.
pub(super) enum PrePullStage<'a> {
    /// There is nothing to pull.
    Idle,
    /// The condition has not been set yet.
    Starting(Vec<NodePull<'a>>),
    /// Images are being pulled, until the deadline.
    InProgress(Vec<NodePull<'a>>, Timestamp),
    /// All images are pulled or have failed, or the deadline has passed; the condition is still true.
    Ending(Vec<NodePull<'a>>),
    /// The condition has been set to false.
    Finished,
}

/// Images to pull to one node.
pub(super) struct NodePull<'a> {
    node: &'a str,
    secrets: Vec<LocalObjectReference>,
    images: Vec<ContainerImage>,
    progress: PullProgress,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PullProgress {
    Missing,
    InProgress,
    /// The pull failed, and the kubelet retries it.
    Retrying,
    Done,
    /// The pull pod has ended without success.
    Failed(String),
}

fn annotation<'a>(instance: &'a RoleInstance, key: &str) -> Option<&'a str> {
    instance.spec.components.iter().find_map(|component| component.template.annotation(key))
}

fn timeout(instance: &RoleInstance) -> Duration {
    let configured =
        annotation(instance, keys::PRE_PULL_TIMEOUT).and_then(|text| humantime::parse_duration(text).ok());
    configured.unwrap_or(TIMEOUT).min(MAX_TIMEOUT)
}

impl<'a> PrePullStage<'a> {
    pub(super) fn of(
        input: InstanceInput<'a>,
        pods: &[&'a Pod],
        revision: &revisions::RevisionRef,
    ) -> Result<Self, PlanError> {
        if annotation(input.instance, keys::PRE_PULL) != Some("true") {
            return Ok(Self::Idle);
        }
        let mut pulls = pulls(input, pods, revision);
        if pulls.is_empty() {
            return Ok(Self::Idle);
        }
        let status = input.instance.status.as_ref();
        let status = status.filter(|status| status.update_revision.as_ref() == Some(&revision.name));
        let mut conditions = status.iter().flat_map(|status| &status.conditions);
        let Some(condition) = conditions.find(|condition| condition.kind == FOR_IMAGES.condition) else {
            return Ok(Self::Starting(pulls));
        };
        if condition.status != "True" {
            return Ok(Self::Finished);
        }
        let since = condition.last_transition_time.as_ref().map_or(input.now, |time| time.0);
        let deadline = add_duration(since, timeout(input.instance));
        for pull in &mut pulls {
            pull.progress = pull.progress(input)?;
        }
        let is_open =
            |pull: &NodePull<'_>| !matches!(pull.progress, PullProgress::Done | PullProgress::Failed(_));
        let is_in_progress = deadline > input.now && pulls.iter().any(is_open);
        Ok(if is_in_progress { Self::InProgress(pulls, deadline) } else { Self::Ending(pulls) })
    }

    /// Whether the instance's pods keep their images for now. Creates pull pods, and deletes those that are no longer needed.
    pub(super) fn delays_update(
        &self,
        input: InstanceInput<'_>,
        plan: &mut ReconcilePlan,
    ) -> Result<bool, PlanError> {
        match self {
            Self::Starting(_) | Self::Ending(_) => return Ok(true),
            Self::InProgress(pulls, deadline) => {
                for pull in pulls.iter().filter(|pull| pull.progress == PullProgress::Missing) {
                    plan.push(WriteAction::Create(pull.pod(input)?), pull.text("is being pulled"));
                }
                plan.schedule_requeue(*deadline);
                return Ok(true);
            }
            Self::Idle | Self::Finished => {}
        }
        for pod in input.pulls.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
            plan.push(warmup::delete_pod(pod), "its images are no longer needed");
        }
        Ok(false)
    }

    /// Sets the condition in the status.
    pub(super) fn set_conditions(&self, input: InstanceInput<'_>, after: &mut RoleInstanceStatus) {
        let before = input.instance.status.as_ref().and_then(|before| before.update_revision.as_ref());
        let is_new = before != after.update_revision.as_ref();
        let conditions = &mut after.conditions;
        let mut wait = FOR_IMAGES;
        let (waiting, unfinished) = match self {
            Self::Starting(pulls) => {
                // Removed, so that its transition time starts again.
                conditions.retain(|condition| condition.kind != FOR_IMAGES.condition);
                (pulls.iter().map(|pull| pull.text("is to be pulled")).collect(), Vec::new())
            }
            Self::InProgress(pulls, _) => {
                if pulls.iter().any(|pull| pull.progress == PullProgress::Retrying) {
                    wait = WaitCondition { pending_reason: CANNOT_PULL, ..wait };
                }
                (pulls.iter().filter_map(NodePull::pending_reason).collect(), Vec::new())
            }
            Self::Ending(pulls) => {
                let limit = humantime::format_duration(timeout(input.instance)).to_string();
                (Vec::new(), pulls.iter().filter_map(|pull| pull.missing_images(&limit)).collect())
            }
            Self::Idle if is_new || status::has(conditions, FOR_IMAGES.condition) => (Vec::new(), Vec::new()),
            Self::Idle | Self::Finished => return,
        };
        set_waiting(conditions, wait, &waiting, &unfinished, input.now);
    }
}

/// Only ready pods that will be restarted: for others the kubelet pulls the images when they start, at no loss.
fn pulls<'a>(
    input: InstanceInput<'a>,
    pods: &[&'a Pod],
    revision: &revisions::RevisionRef,
) -> Vec<NodePull<'a>> {
    let mut by_node: BTreeMap<&str, NodePull<'a>> = BTreeMap::new();
    for pod in pods {
        let is_new = pod_label(pod, keys::CONTROLLER_REVISION_HASH) == Some(revision.hash.as_str());
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        let Some(node) = node.filter(|_| !is_new && pod_has(pod, "Ready")) else { continue };
        let images = in_place::new_images(input, pod).unwrap_or_default();
        let Some(component) = component_of(input.instance, pod).filter(|_| !images.is_empty()) else {
            continue;
        };
        let pull = by_node.entry(node).or_insert_with(|| NodePull {
            node,
            secrets: Vec::new(),
            images: Vec::new(),
            progress: PullProgress::Missing,
        });
        for secret in pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten()) {
            if !pull.secrets.contains(secret) {
                pull.secrets.push(secret.clone());
            }
        }
        for (container, name) in &images {
            let spec =
                component.template.containers().iter().find(|status| status["name"] == container.as_str());
            let policy = spec.and_then(|spec| spec.get("imagePullPolicy")?.as_str()).map(str::to_owned);
            pull.images.extend(name.as_str().map(|name| ContainerImage { name: name.to_owned(), policy }));
        }
    }
    let mut pulls: Vec<NodePull<'a>> = by_node.into_values().collect();
    for pull in &mut pulls {
        pull.images.sort();
        pull.images.dedup();
    }
    pulls
}

impl NodePull<'_> {
    fn pod(&self, input: InstanceInput<'_>) -> Result<moongate_render::Manifest, PlanError> {
        render::pod(input.instance, self.node, &self.images, &json!(self.secrets))
    }

    fn progress(&self, input: InstanceInput<'_>) -> Result<PullProgress, PlanError> {
        let wanted = self.pod(input)?;
        let name = |pod: &&Pod| pod.metadata.name.as_deref() == Some(wanted.name());
        let Some(pod) = input.pulls.iter().find(name) else { return Ok(PullProgress::Missing) };
        if warmup::is_done(pod) {
            return Ok(PullProgress::Done);
        }
        let status = pod.status.as_ref();
        if status.and_then(|status| status.phase.as_deref()) == Some("Failed") {
            let reason = status.and_then(|status| status.reason.clone());
            return Ok(PullProgress::Failed(reason.unwrap_or_else(|| "its pod failed".to_owned())));
        }
        let containers = status.into_iter().flat_map(|status| status.container_statuses.iter().flatten());
        let mut reasons =
            containers.filter_map(|status| status.state.as_ref()?.waiting.as_ref()?.reason.as_deref());
        // The kubelet alternates between these reasons, so only the class is kept.
        Ok(if reasons.any(|reason| PULL_FAILURE_REASONS.contains(&reason)) {
            PullProgress::Retrying
        } else {
            PullProgress::InProgress
        })
    }

    fn text(&self, what: &str) -> String {
        let images: Vec<&str> = self.images.iter().map(|image| image.name.as_str()).collect();
        format!("{} {what} to {}", images.join(", "), self.node)
    }

    fn pending_reason(&self) -> Option<String> {
        match &self.progress {
            PullProgress::Done => None,
            PullProgress::Missing | PullProgress::InProgress => Some(self.text("is being pulled")),
            PullProgress::Retrying => Some(self.text("cannot be pulled")),
            PullProgress::Failed(why) => Some(format!("{}: {why}", self.text("cannot be pulled"))),
        }
    }

    /// The images that the update starts without.
    fn missing_images(&self, limit: &str) -> Option<String> {
        match &self.progress {
            PullProgress::Done => None,
            PullProgress::Failed(_) => self.pending_reason(),
            _ => Some(format!("{} within {limit}", self.text("was not pulled"))),
        }
    }
}
