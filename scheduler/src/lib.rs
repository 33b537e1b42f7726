//! The routing decision: pure, deterministic, no I/O.
//!
//! A [`Policy`] takes values ([`Input`]) and returns a value ([`Verdict`] or [`Refusal`]). The [`Scheduler`] around it
//! holds requests, keeps the book of what was sent and learns from first tokens. Neither reads a clock, a socket, a lock
//! or a random source: time and entropy come with every call. So the gateway and a simulator run the same code, and
//! the same calls give the same decisions.

mod book;
mod cache_rules;
mod cluster;
mod decision;
mod estimate;
mod farness;
pub mod index;
mod learn;
mod policy;
mod prediction;
mod prefill_queue;
mod request;
mod scheduler;
mod service;
mod service_mix;
mod settings;
mod snapshot;

pub use cache_rules::{CacheRules, Prefetch};
pub use cluster::{
    Cluster, Distance, Instance, InstanceIx, Load, ModelIx, PairingDomain, Place, Reported, Role,
};
pub use decision::{Booking, Candidate, Decision, Explanation, Refusal, Route, Term, Terms};
pub use estimate::Estimate;
pub use farness::{Site, SiteRun, farness, tokens_by_site};
pub use policy::{Input, Policy, PolicyName, Round, UnknownPolicy, Verdict};
pub use prediction::{L3Run, Medium, Prediction, TierHits};
pub use request::{Request, Seconds};
pub use scheduler::{Ask, Event, Scheduler, Ticket};
pub use service::ServiceModel;
pub use service_mix::ServiceMix;
pub use settings::{Settings, TtftTarget};
pub use snapshot::Snapshot;
