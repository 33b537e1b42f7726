//! What objects' statuses say. Pure.

mod conditions;
mod group;
mod group_set;
mod instance;
mod set;
mod waiting;
mod warmup;

pub use conditions::{has, set_condition, since};
pub use group::{RoleState, group, is_group_ready, is_group_settled};
pub use group_set::{GroupSetFacts, group_set};
pub use instance::{instance, is_available, is_ready, is_scheduled};
pub(crate) use instance::{pod_has, pod_label, unready_since};
pub use set::{SetFacts, set};
pub(crate) use waiting::{
    CANNOT_PULL, FOR_HOOKS, FOR_IMAGES, NOT_PULLED, TIMED_OUT, Wait, gather_waiting, set_waiting,
};
pub(crate) use warmup::deadline;
pub use warmup::{WarmupFacts, is_warmup_over, warmup};
