//! The operator: keeps RoleBasedGroups running.
//!
//! - [`observed`]: what watches have told, and what our own writes were answered with.
//! - [`plan`] (pure): observed and desired become ordered steps, each with its reason.
//! - [`status`] (pure): observed becomes what an object's status says.
//! - [`apply`]: the only room that writes to Kubernetes.
//! - [`controllers`]: loops over these.
//! - [`admission`] (pure): whether an object may be stored.
//! - [`forecast`] (pure): plans carried out in memory, to tell what they will do.
//! - [`events`]: what is told to people besides.
//! - [`kubectl`]: what people do with groups.
//! - [`webhooks`]: answers the API server, and keeps what it needs for that.
//!
//! Nothing is remembered that is not in an object: a process that takes over sees the same and goes on.

pub mod admin;
pub mod controllers;
pub mod events;
pub mod forecast;
pub mod kind;
pub mod kubectl;
mod metrics;
pub mod plan;
pub mod resource_cache;
pub mod resource_writer;
mod spans;
pub mod status;
pub mod validation;
pub mod webhooks;

pub use controllers::{ApiServerTimeouts, OperatorOptions, client, run};
pub use kind::ResourceKind;
pub use metrics::OperatorMetrics;
pub use moongate_render::GangScheduler;
