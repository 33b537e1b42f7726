//! The planner's controller on Kubernetes: scales the prefill and decode engines of deployments as the capacity planner decides.
//!
//! - [`deployments_file`]: what is scaled, by which metrics, with which settings; reloaded on change.
//! - `controller`: starts, changes and ends the loops of the file's deployments.
//! - `deployment`: one loop that observes, decides and scales.
//! - `scrape`, `gateway_metrics`: reads the metrics of all gateways of a deployment.
//! - `signals` (pure): turns them into the signals of [`moongate_capacity`].
//! - `role_tracker`, `scale_target`, `replicas`: the scale subresource of a role, and a watch of its pods.
//! - `state_store`: what planners have learned, in ConfigMaps.
//! - [`admin`], `metrics`, `plan_board`: probes, metrics and the last plans.

pub mod admin;
mod controller;
mod deployment;
pub mod deployments_file;
mod gateway_metrics;
mod metrics;
mod plan_board;
mod replicas;
mod role_tracker;
mod scale_target;
mod scrape;
mod signals;
mod state_store;

pub use controller::{KubeClientError, PlannerError, PlannerOptions, run};
pub use metrics::PlannerMetrics;
pub use plan_board::PlanBoard;
pub use scale_target::{InvalidScaleTarget, ScaleTarget};
