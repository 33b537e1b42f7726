//! What is to be done: ordered steps, each with its reason. Pure: time is part of the input.

mod adapter;
mod components;
mod coordination;
mod gang;
mod group;
mod group_set;
mod hooks;
mod in_place;
mod instance;
mod lifecycle;
mod nodes;
mod observed;
mod ordered;
mod places;
mod ports;
mod pre_pull;
mod profiles;
mod restart;
mod revisions;
mod set;
mod stateful;
mod targets;
mod unordered;
mod warmup;

pub use adapter::{AdapterInput, adapter};
pub(crate) use group::check_dependencies;
pub use group::{GroupInput, PortFor, group};
pub use group_set::{GroupSetInput, MAX_UNAVAILABLE, group_set};
pub(crate) use hooks::is_awaited;
pub use hooks::{Answer, Ask, Hook};
pub(crate) use in_place::{GRACE as IN_PLACE_GRACE, RESTARTED_AT, is_same_image};
pub use instance::{InstanceInput, instance};
pub use observed::observed;
pub use places::NodeLabels;
pub use set::{SetInput, set};
pub use warmup::{WarmupInput, warmup};

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use moongate_render::{Manifest, RenderError};
use serde_json::Value;

use crate::Kind;

/// Between two questions to a pod.
const PERIOD: Duration = Duration::from_secs(1);

/// Why an object cannot be planned for.
pub type PlanError = RenderError;

/// What is to be done about one object, in this order. When a step fails, those behind it wait for the next plan.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// The steps.
    pub steps: Vec<Step>,
    /// When to look again although nothing has changed.
    pub again_at: Option<Timestamp>,
    /// Whom to ask meanwhile. The answers are part of what the next plan is made from.
    pub asks: Vec<Ask>,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// What.
    pub action: Action,
    /// Why, for events, logs and dry runs.
    pub reason: String,
}

/// One write.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Server-side apply: the object shall be so, as far as it is said.
    Apply(Manifest),
    /// A new object. That it is there already is no error, if it has the same owner.
    Create(Manifest),
    /// The whole object anew; refused by the server if it has changed since it was read.
    Replace {
        /// Its kind.
        kind: Kind,
        /// Its name.
        name: String,
        /// The object, with the resource version that was read.
        object: Value,
    },
    /// Some members. Core kinds take a strategic merge patch, ours a merge patch.
    Patch {
        /// Its kind.
        kind: Kind,
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
        kind: Kind,
        /// Its name.
        name: String,
        /// Its UID: one that has the name since is spared.
        uid: String,
    },
}

impl Plan {
    pub(crate) fn push(&mut self, action: Action, reason: impl Into<String>) {
        self.steps.push(Step { action, reason: reason.into() });
    }

    pub(crate) fn look_again(&mut self, at: Timestamp) {
        self.again_at = Some(self.again_at.map_or(at, |before| before.min(at)));
    }

    /// Questions to pods, which are repeated until the answers are as they shall be.
    pub(crate) fn ask(&mut self, asks: impl IntoIterator<Item = Ask>, now: Timestamp) {
        let before = self.asks.len();
        self.asks.extend(asks);
        if self.asks.len() > before {
            self.look_again(after(now, PERIOD));
        }
    }

    /// A status, if it is not the one that the object has. While objects are made, or instances updated, it is left to the next
    /// plan, which sees them: what could be told now would be old at once.
    pub(crate) fn status<T: serde::Serialize + PartialEq>(
        &mut self,
        kind: Kind,
        name: &str,
        before: Option<&T>,
        after: &T,
    ) {
        let is_old = |step: &Step| {
            matches!(step.action, Action::Create(_) | Action::Replace { kind: Kind::Instance, .. })
        };
        if before != Some(after) && !self.steps.iter().any(is_old) {
            let status = serde_json::to_value(after).unwrap_or_default();
            let body = serde_json::json!({ "status": status });
            let action = Action::Patch { kind, name: name.to_owned(), status: true, body };
            self.push(action, "the status has changed");
        }
    }
}

/// A time that far from another; the same time if there is none.
pub(crate) fn after(time: Timestamp, wait: Duration) -> Timestamp {
    time.checked_add(wait).unwrap_or(time)
}
