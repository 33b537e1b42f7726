//! The engines as the gateway uses them: topology snapshots joined with what the gateway itself knows of each
//! engine (connections, health, breaker).

mod book;
mod breaker;
mod endpoint;
mod follow;
mod health;
mod loads;
mod prompts;
mod rules;
mod silence;
mod snapshot;

pub(crate) use book::OnEngine;
pub(crate) use breaker::BreakerLimits;
pub(crate) use endpoint::{Endpoint, EndpointLimits};
pub(crate) use follow::FleetReader;
pub(crate) use follow::follow;
pub(crate) use health::{HealthLimits, check_health, probe_suspects};
pub(crate) use loads::poll_loads;
pub(crate) use prompts::PromptCounts;
pub(crate) use silence::{SilenceLimits, SuspicionReason};
pub(crate) use snapshot::{Fleet, Member, ModelUnavailable, domain_name, host};
