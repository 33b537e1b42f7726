//! The planner on a real control plane, with a scripted gateway and a kubelet that runs no containers.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod scaling;
mod scripted_gateway;
mod state;
mod test_planner;
