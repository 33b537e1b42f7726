//! The operator: reconciles RoleBasedGroups.
//!
//! - [`resource_cache`]: watches, the objects from them and from responses to our own writes, the queue of what is to be
//!   reconciled, and snapshots for plans.
//! - [`plan`] (pure): turns observed and desired state into ordered steps, each with its reason.
//! - [`status`] (pure): computes the statuses of objects.
//! - [`resource_writer`]: writes to Kubernetes; no other module writes groups' objects.
//! - [`controllers`]: the workers that take objects from the queue, plan and write; leader election.
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
mod kube_client;
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
pub use kube_client::KubeClientError;
pub use metrics::OperatorMetrics;
pub use moongate_render::{GangScheduler, SizeLimits};
