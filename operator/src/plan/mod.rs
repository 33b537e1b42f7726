//! What is to be done: ordered steps, each with its reason. Pure: time is part of the input.

mod adapter;
mod component_order;
mod coordination;
mod desired_roles;
mod from_cache;
mod gang;
mod group;
mod group_set;
mod hooks;
mod in_place;
mod instance;
mod lifecycle;
mod node_affinity;
mod ordered;
mod pod_locations;
mod ports;
mod pre_pull;
mod profiles;
mod restart;
mod revisions;
mod set;
mod stateful;
mod unordered;
mod warmup;

pub use adapter::{AdapterInput, adapter};
pub use from_cache::plan_for;
pub(crate) use group::check_dependencies;
pub use group::{GroupInput, PortAllocator, group};
pub use group_set::{GroupSetInput, MAX_UNAVAILABLE, group_set};
pub(crate) use hooks::is_pending;
pub use hooks::{HookCall, HookResult, UpgradeHook};
pub(crate) use in_place::{GRACE as IN_PLACE_GRACE, RESTARTED_AT, is_same_image};
pub use instance::{InstanceInput, instance};
pub use pod_locations::NodeLabelLookup;
pub use set::{InstanceSetInput, set};
pub use warmup::{WarmupInput, warmup};

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use moongate_render::{Manifest, RenderError};
use serde_json::Value;

use crate::ResourceKind;

/// Between two questions to a pod.
const HOOK_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Why an object cannot be planned for.
pub type PlanError = RenderError;

/// What is to be done about one object, in this order. When a step fails, those behind it wait for the next plan.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReconcilePlan {
    /// The steps.
    pub steps: Vec<PlanStep>,
    /// When to look again although nothing has changed.
    pub requeue_at: Option<Timestamp>,
    /// Whom to ask meanwhile. The answers are part of what the next plan is made from.
    pub hook_calls: Vec<HookCall>,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanStep {
    /// What.
    pub action: WriteAction,
    /// Why, for events, logs and dry runs.
    pub reason: String,
}

/// One write.
#[derive(Debug, Clone, PartialEq)]
pub enum WriteAction {
    /// Server-side apply: the object shall be so, as far as it is said.
    Apply(Manifest),
    /// A new object. That it is there already is no error, if it has the same owner.
    Create(Manifest),
    /// The whole object anew; refused by the server if it has changed since it was read.
    Replace {
        /// Its kind.
        kind: ResourceKind,
        /// Its name.
        name: String,
        /// The object, with the resource version that was read.
        object: Value,
    },
    /// Some members. Core kinds take a strategic merge patch, ours a merge patch.
    Patch {
        /// Its kind.
        kind: ResourceKind,
        /// Its name.
        name: String,
        /// Whether it goes to the status.
        status: bool,
        /// The members.
        body: Value,
    },
    /// The end of an object.
    Delete {
        /// Its kind.
        kind: ResourceKind,
        /// Its name.
        name: String,
        /// Its UID: one that has the name since is spared.
        uid: String,
    },
}

impl ReconcilePlan {
    pub(crate) fn push(&mut self, action: WriteAction, reason: impl Into<String>) {
        self.steps.push(PlanStep { action, reason: reason.into() });
    }

    pub(crate) fn schedule_requeue(&mut self, at: Timestamp) {
        self.requeue_at = Some(self.requeue_at.map_or(at, |before| before.min(at)));
    }

    /// Questions to pods, which are repeated until the answers are as they shall be.
    pub(crate) fn call_hooks(&mut self, asks: impl IntoIterator<Item = HookCall>, now: Timestamp) {
        let before = self.hook_calls.len();
        self.hook_calls.extend(asks);
        if self.hook_calls.len() > before {
            self.schedule_requeue(add_duration(now, HOOK_POLL_INTERVAL));
        }
    }

    /// A status, if it is not the one that the object has. While objects are made, or instances updated, it is left to the next
    /// plan, which sees them: what could be told now would be old at once.
    pub(crate) fn status<T: serde::Serialize + PartialEq>(
        &mut self,
        kind: ResourceKind,
        name: &str,
        before: Option<&T>,
        after: &T,
    ) {
        let is_old = |step: &PlanStep| {
            matches!(
                step.action,
                WriteAction::Create(_) | WriteAction::Replace { kind: ResourceKind::Instance, .. }
            )
        };
        if before != Some(after) && !self.steps.iter().any(is_old) {
            let status = serde_json::to_value(after).unwrap_or_default();
            let body = serde_json::json!({ "status": status });
            let action = WriteAction::Patch { kind, name: name.to_owned(), status: true, body };
            self.push(action, "the status has changed");
        }
    }
}

/// A time that far from another; the same time if there is none.
pub(crate) fn add_duration(time: Timestamp, wait: Duration) -> Timestamp {
    time.checked_add(wait).unwrap_or(time)
}
