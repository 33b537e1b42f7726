//! The engines as the gateway uses them: topology snapshots joined with what the gateway itself knows of each
//! engine (connections, load book, health, breaker).

mod book;
mod breaker;
mod endpoint;
mod follow;
mod health;
mod snapshot;

pub(crate) use book::Booked;
pub(crate) use breaker::BreakerLimits;
pub(crate) use endpoint::{Endpoint, EndpointLimits};
pub(crate) use follow::FleetReader;
pub(crate) use follow::follow;
pub(crate) use health::{HealthLimits, check_health};
pub(crate) use snapshot::{Fleet, Member};
