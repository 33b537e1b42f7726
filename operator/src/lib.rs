//! The operator: reconciles RoleBasedGroups.
//!
//! - [`resource_cache`]: objects from watches and from responses to our own writes.
//! - [`plan`] (pure): turns observed and desired state into ordered steps, each with its reason.
//! - [`status`] (pure): computes the statuses of objects.
//! - [`resource_writer`]: writes to Kubernetes; no other module writes groups' objects.
//! - [`controllers`]: the loops around these.
//! - [`upgrade_hook`]: calls of pods' hooks and their responses, as values.
//! - [`validation`] (pure): whether an object may be stored.
//! - [`forecast`] (pure): carries plans out in memory to preview their steps.
//! - [`events`]: Kubernetes events.
//! - [`kubectl`]: the commands of `kubectl moongate`.
//! - [`webhooks`]: serves conversion and validation, and registers the webhooks.
//!
//! All state is stored in objects: after a failover, the next leader reads the same state and continues.

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
mod time;
pub mod upgrade_hook;
pub mod validation;
pub mod webhooks;

pub use controllers::{ApiServerTimeouts, OperatorOptions, client, run};
pub use kind::ResourceKind;
pub use metrics::OperatorMetrics;
pub use moongate_render::GangScheduler;
