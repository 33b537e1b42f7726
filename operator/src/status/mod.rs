//! Statuses of objects, as pure functions.

mod conditions;
mod fault;
mod group;
mod group_set;
mod instance;
mod set;
mod stalled;
mod waiting;
mod warmup;

pub use conditions::{has, set_condition, since};
pub(crate) use fault::{FAULT_BUDGET_EXHAUSTED, FAULT_RECOVERY, INSTANCE_FAULT, INVALID_POLICY};
pub use group::{ObservedRoleStatus, group, is_group_ready, is_group_settled};
pub use group_set::{ObservedGroupSet, group_set};
pub use instance::{instance, is_available, is_ready, is_scheduled};
pub(crate) use instance::{pod_has, pod_label, unready_since};
pub use set::{ObservedInstanceSet, set};
pub(crate) use stalled::{
    INCOMPATIBLE_GANG, INVALID_SPEC, LIMIT_EXCEEDED, WRITE_REFUSED, aggregate_stalled, set_stalled,
    stalled_patch,
};
pub(crate) use waiting::{
    CANNOT_PULL, FOR_HOOKS, FOR_IMAGES, NOT_PULLED, TIMED_OUT, WaitCondition, aggregate_scaling_in,
    aggregate_waiting, set_scaling_in, set_waiting,
};
pub(crate) use warmup::deadline;
pub use warmup::{ObservedWarmup, is_warmup_over, warmup};
