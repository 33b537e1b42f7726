//! Recovery from faults across roles, as a CoordinatedPolicy's `faultRecovery` defines it.
//!
//! 1. The plan of an instance records its faults in an annotation ([`observe`]), before anything removes the evidence.
//! 2. The plan of the group reads these records, and requests an action from each associated instance, in another annotation
//!    ([`coordinate`]). Then it marks the fault as dealt with.
//! 3. The plan of an associated instance carries the action out on the pods that the request names ([`recover`]), and records its end.
//!
//! Each annotation has one writer. Every record has an identity: that of the fault, and of the pods to act on. So an operator that takes
//! over after any write continues there, and repeats nothing. An instance records no fault while an action on it is in progress, except
//! the loss of its node; so actions cause no further ones.

mod coordinate;
mod history;
mod observe;
mod policy_error;
mod records;
mod recover;
mod replacement;
mod rules;

pub(crate) use coordinate::requested_action;
pub(super) use coordinate::{GroupRecovery, coordinate};
pub(super) use observe::observe;
pub use policy_error::FaultPolicyError;
pub(super) use recover::{RecoveryProgress, placement, recover, set_recovery_condition};
pub use rules::FaultRules;

use k8s_openapi::jiff::Timestamp;

/// Looks up the state of a node.
pub type NodeStateLookup<'a> = &'a dyn Fn(&str) -> NodeState;

/// State of a node in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeState {
    /// Nodes have not been listed, so that its absence means nothing.
    Unlisted,
    /// It does not exist.
    Gone,
    Present {
        uid: String,
        /// Since when it is not ready or unreachable.
        not_ready_since: Option<Timestamp>,
    },
}
