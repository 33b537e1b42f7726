//! The operator's plans in memory, and the operator on a real control plane.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod forecast;
mod group_set;
mod instance_set;
mod kubernetes;
mod simulated;
