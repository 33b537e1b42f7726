//! The routing decision: pure, deterministic, no I/O.
//!
//! A [`Policy`] takes values ([`PolicyInput`]) and returns a value ([`PolicyVerdict`] or [`ScheduleRejection`]). The
//! [`Scheduler`] around it queues requests, tracks the load that was sent and learns from first tokens. Neither reads a
//! clock, a socket, a lock or a random source: time and entropy are arguments of every call. So the gateway and the
//! simulator run the same code, and the same calls give the same decisions.

mod adapter_loads;
mod attempt;
mod background;
mod cache_params;
mod decision;
mod decode_step;
mod decode_tracker;
mod engine_models;
mod estimate;
mod fleet;
pub mod index;
mod least_squares;
mod load_tracker;
mod network_distance;
mod options;
mod pending_prompts;
mod policy;
mod prediction;
mod prefill_queue;
mod prefill_time;
mod prefill_time_distribution;
mod prefill_time_learner;
mod request;
mod scheduler;
mod seconds;
mod snapshot;

pub use adapter_loads::{AdapterResidencies, AdapterResidency};
pub use attempt::AttemptId;
pub use background::BACKGROUND_PRIORITY;
pub use cache_params::{EngineCacheParams, PrefetchBehavior};
pub use decision::{
    CandidateEngine, CostBreakdown, CostTerm, DecisionExplanation, EngineRoute, LoadReservation,
    RoutingDecision, ScheduleRejection,
};
pub use decode_step::DecodeStepModel;
pub use estimate::PrefillEstimate;
pub use fleet::{
    InstanceIndex, InstanceLoad, InstanceRole, LocationIds, ModelIndex, PairingDomain, ReportedLoad,
    SchedulableFleet, SchedulableInstance, TopologyDistance,
};
pub use network_distance::{StoreSite, StoreSiteIndex, StoreSiteRun, network_distance, tokens_by_site};
pub use options::{SchedulerOptions, TtftTarget};
pub use policy::{
    HeldChoice, Policy, PolicyInput, PolicyName, PolicyVerdict, ScheduleRound, UnknownPolicyError,
};
pub use prediction::{CacheHitPrediction, StoreMedium, StoreTokenRun, TextPrefix, TierHits};
pub use prefill_time::PrefillTimeModel;
pub use prefill_time_distribution::PrefillTimeDistribution;
pub use request::RequestProfile;
pub use scheduler::{ScheduleRequest, Scheduler, SchedulerEvent};
pub use seconds::Seconds;
pub use snapshot::DecisionSnapshot;
