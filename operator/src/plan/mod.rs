//! Plans: ordered steps, each with its reason.
//!
//! Pure functions: a snapshot of the objects and the time go in, and all effects come out as values ([`ReconcilePlan`]).

mod adapter;
mod component_order;
mod coordination;
mod deletion_order;
mod desired_roles;
mod fault;
mod from_snapshot;
mod gang;
mod group;
mod group_set;
mod hooks;
mod in_place;
mod instance;
mod lifecycle;
mod managed_metadata;
mod node_affinity;
mod ordered;
mod pod_locations;
mod ports;
mod pre_pull;
mod profiles;
mod restart;
mod revisions;
mod set;
mod shrink;
mod stateful;
mod topology;
mod unordered;
mod warmup;

pub use adapter::{AdapterInput, adapter};
pub(crate) use fault::requested_action;
pub use fault::{FaultPolicyError, FaultRules, NodeState, NodeStateLookup};
pub use from_snapshot::plan_for;
pub use group::GroupPlanError;
pub(crate) use group::check_dependencies;
pub use group::{GroupInput, group};
pub use group_set::{GroupSetInput, MAX_UNAVAILABLE, group_set};
pub(crate) use in_place::{GRACE as IN_PLACE_GRACE, RESTARTED_AT, is_same_image};
pub use instance::{InstanceInput, instance};
pub use pod_locations::NodeLabelLookup;
pub use set::{InstanceSetInput, set};
pub use warmup::{WarmupInput, warmup};

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use moongate_render::{GangScheduler, Manifest, RenderError, SizeLimits};
use serde_json::Value;

use crate::ResourceKind;
use crate::resource_cache::PortChoice;
use crate::status;
use crate::time::add_duration;
use crate::upgrade_hook::HookCall;

/// Steps of one plan. Further ones are left to the next plan, so that the memory that a plan takes is bounded.
const MAX_STEPS: usize = 1000;

/// Interval between two hook calls to a pod.
const HOOK_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Error for an object whose spec is invalid.
pub type PlanError = RenderError;

/// Settings of all plans.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlanSettings {
    /// The scheduler that handles gangs.
    pub gang_scheduler: GangScheduler,
    /// Maximum numbers of objects that one object may request.
    pub size_limits: SizeLimits,
}

/// Reason in the conditions of an object that cannot be planned because of this error.
pub(crate) fn condition_reason(error: &PlanError) -> &'static str {
    match error {
        RenderError::Limit(_) => status::LIMIT_EXCEEDED,
        _ => status::INVALID_SPEC,
    }
}

/// Steps for one object, in order. When a step fails, the steps after it are left to the next plan.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReconcilePlan {
    /// Writes in the order in which they are carried out.
    pub steps: Vec<PlanStep>,
    /// Whether steps were left to the next plan.
    pub is_truncated: bool,
    /// When to reconcile again although nothing has changed.
    pub requeue_at: Option<Timestamp>,
    /// Hooks to call meanwhile. Their responses are input of the next plan.
    pub hook_calls: Vec<HookCall>,
    /// Ports that the steps store in objects. They have to be reserved before the first step, or planned again if they are
    /// taken by then.
    pub port_choices: Vec<PortChoice>,
}

/// One write with its reason.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanStep {
    pub action: WriteAction,
    /// The reason, for events, logs and dry runs.
    pub reason: String,
}

/// Upstream's field manager, so that either controller takes over the fields that the other applied.
pub(crate) const FIELD_MANAGER: &str = "rbg";

/// A write to the API server.
#[derive(Debug, Clone, PartialEq)]
pub enum WriteAction {
    /// Server-side apply of the fields in the manifest.
    Apply(Manifest),
    /// Create. An existing object is no error if it has the same owner.
    Create(Manifest),
    /// Replace the whole object; the server rejects it if the object has changed since it was read.
    Replace {
        kind: ResourceKind,
        name: String,
        /// The object, with the resource version that was read.
        object: Value,
    },
    /// Patch some fields. Core kinds take a strategic merge patch, CRDs a merge patch.
    Patch {
        kind: ResourceKind,
        name: String,
        /// Whether the patch goes to the status subresource.
        status: bool,
        body: Value,
    },
    /// Delete the object with this UID.
    Delete {
        kind: ResourceKind,
        name: String,
        /// UID of the object: a newer object with the same name is not deleted.
        uid: String,
    },
    /// Delete the pod with this UID without its kubelet's confirmation: its node is lost.
    ForceDelete { name: String, uid: String },
}

impl ReconcilePlan {
    pub(crate) fn push(&mut self, action: WriteAction, reason: impl Into<String>) {
        if self.is_full() {
            self.is_truncated = true;
        } else {
            self.steps.push(PlanStep { action, reason: reason.into() });
        }
    }

    /// Adds the steps of a part of the plan before all others.
    fn prepend<T>(&mut self, add: impl FnOnce(&mut Self) -> T) -> T {
        let later = std::mem::take(&mut self.steps);
        let result = add(self);
        for step in later {
            self.push(step.action, step.reason);
        }
        result
    }

    /// Whether further steps are left to the next plan.
    pub(crate) fn is_full(&self) -> bool {
        self.steps.len() >= MAX_STEPS
    }

    pub(crate) fn schedule_requeue(&mut self, at: Timestamp) {
        self.requeue_at = Some(self.requeue_at.map_or(at, |before| before.min(at)));
    }

    /// Adds hook calls, which are repeated until their hooks have finished.
    pub(crate) fn call_hooks(&mut self, asks: impl IntoIterator<Item = HookCall>, now: Timestamp) {
        let before = self.hook_calls.len();
        self.hook_calls.extend(asks);
        if self.hook_calls.len() > before {
            self.schedule_requeue(add_duration(now, HOOK_POLL_INTERVAL));
        }
    }

    /// Adds a status patch, if the status differs. While objects are created, instances updated or the object itself is
    /// replaced, the status is left to the next plan, which observes them: it would be outdated at once.
    pub(crate) fn status<T: serde::Serialize + PartialEq>(
        &mut self,
        kind: ResourceKind,
        name: &str,
        before: Option<&T>,
        after: &T,
    ) {
        let is_old = |step: &PlanStep| match &step.action {
            WriteAction::Create(_) => true,
            WriteAction::Replace { kind: replaced, .. } => {
                *replaced == ResourceKind::Instance || *replaced == kind
            }
            _ => false,
        };
        if before != Some(after) && !self.steps.iter().any(is_old) {
            let status = serde_json::to_value(after).unwrap_or_default();
            let body = serde_json::json!({ "status": status });
            let action = WriteAction::Patch { kind, name: name.to_owned(), status: true, body };
            self.push(action, "the status has changed");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_replaced_object_gets_its_status_from_the_next_plan() {
        for (replaced, steps) in [(ResourceKind::Group, 1), (ResourceKind::Adapter, 2)] {
            let mut plan = ReconcilePlan::default();
            let action = WriteAction::Replace { kind: replaced, name: "g".to_owned(), object: Value::Null };
            plan.push(action, "because");
            plan.status(ResourceKind::Group, "g", Some(&json!({ "observedGeneration": 1 })), &json!({}));
            assert_eq!(plan.steps.len(), steps, "{replaced:?}");
        }
    }
}
