//! Results and state changes of the master, case by case and against a simple model.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod disks;
mod drains;
mod eviction;
mod groups;
mod harness;
mod joining;
mod model;
mod model_comparison;
mod nodes;
mod puts;
mod rebuild;
mod replay;
mod retention;
mod task_replay;
mod tenants;
mod threads;
mod transfers;
