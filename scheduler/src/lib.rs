//! The routing decision: pure, deterministic, no I/O.
//!
//! A [`Policy`] takes values ([`Input`]) and returns a value ([`Decision`] or [`Refusal`]). It never reads a
//! clock, a socket, a lock or a random source: time, sequence number and entropy are part of the input. So the
//! gateway and a simulator run the same code, and a captured input replays to the same decision.

mod cluster;
mod decision;
pub mod index;
mod policy;
mod prediction;
mod request;

pub use cluster::{
    Cluster, Distance, Instance, InstanceIx, Load, ModelIx, PairingDomain, Place, Reported, Role,
};
pub use decision::{Booking, Candidate, Decision, Explanation, Refusal, Route, Term};
pub use policy::{Input, Policy, PolicyName, UnknownPolicy};
pub use prediction::{L3Run, Medium, Prediction, TierHits};
pub use request::{Request, Seconds};
