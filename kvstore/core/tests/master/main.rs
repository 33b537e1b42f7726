//! What a master answers and tells, case by case and against a simple model.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod compared;
mod disks;
mod eviction;
mod groups;
mod model;
mod nodes;
mod puts;
mod rebuild;
mod replay;
mod tenants;
mod threads;
mod transfers;
mod works;
mod world;
