//! What a master answers and tells, case by case and against a simple model.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod eviction;
mod model;
mod nodes;
mod puts;
mod replay;
mod tenants;
mod transfers;
mod world;
