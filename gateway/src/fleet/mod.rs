//! The engines as the gateway uses them: topology snapshots joined with the gateway's own state of each engine (connections,
//! health, breaker).

mod adapter_loads;
mod availability;
mod breaker;
mod cache_rules;
mod decision;
mod endpoint;
mod group;
mod health;
mod in_flight;
mod loads;
mod pairing;
mod prompts;
mod ranks;
mod silence;
mod snapshot;
mod tokenize_methods;
mod version_pairing;
mod watch;

pub(crate) use adapter_loads::AdapterLoadStep;
pub(crate) use breaker::BreakerLimits;
pub(crate) use decision::FleetDecision;
pub(crate) use endpoint::{EndpointLimits, UpstreamEndpoint};
pub(crate) use group::{EngineGroup, EngineGroupMember};
pub(crate) use health::{HealthCheckLimits, check_health, probe_suspects};
pub(crate) use in_flight::EngineInFlightGuard;
pub(crate) use loads::poll_loads;
pub(crate) use pairing::domain_name;
pub(crate) use prompts::PromptCountSnapshot;
pub(crate) use silence::{SilenceLimits, SuspicionReason};
pub(crate) use snapshot::{FleetMember, FleetSnapshot, ModelUnavailable, host};
pub(crate) use tokenize_methods::{TokenizeMethod, TokenizeOutcome};
pub(crate) use version_pairing::VersionRule;
pub use version_pairing::{CompatibleVersions, VersionPairing};
pub(crate) use watch::FleetReader;
pub(crate) use watch::watch_topology;
