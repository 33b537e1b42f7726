//! What objects' statuses say. Pure.

mod conditions;
mod group;
mod instance;
mod set;

pub use conditions::{has, set_condition, since};
pub use group::{RoleState, group};
pub use instance::{instance, is_available, is_ready};
pub(crate) use instance::{pod_has, pod_label, unready_since};
pub use set::{SetFacts, set};
