//! Test support for the operator: its plans on objects in memory, in an order that follows a seed.

mod simulated_hooks;
mod simulation;

pub use simulated_hooks::SimulatedHooks;
pub use simulation::{OperatorSimulation, PORTS, is_ready};
