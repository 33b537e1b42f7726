//! A Mooncake-compatible master: what clients of every release of Mooncake talk to.
//!
//! The state machine is [`moongate_master_core`]; here are its clock, its callers and its journal.
//!
//! - [`MasterServer`]: the state machine with all that belongs to it.
//! - [`rpc`]: Mooncake's RPC port. [`call`]: from a request's bytes to the state machine and back.
//! - [`journal`]: where every change goes before anybody is told of it. [`durable`]: one that survives.
//! - [`ha`]: more than one master, of which one leads.
//! - [`flags`]: the command line of Mooncake's master. [`start`]: all of it together.
//! - [`http`]: the admin server. [`metadata`]: where clients find each other. [`events`]: what is published over ZeroMQ.

mod aux_services;
pub mod call;
mod capabilities;
mod clock;
mod command;
mod counters;
mod dialects;
pub mod durable;
mod epochs;
pub mod events;
pub mod flags;
pub mod ha;
pub mod http;
pub mod journal;
pub mod metadata;
mod metrics;
mod object_feed;
pub mod observer;
mod persistence;
mod presence;
pub mod quotas;
mod record;
pub mod rpc;
mod server;
mod state;
pub mod summary;
pub mod ticker;
mod unknown_forms;
mod upserts;

pub use aux_services::{
    AuxServiceAddresses, AuxServiceError, AuxServices, AuxServicesOptions, KvEventServiceOptions,
    MetadataLocation, MetadataServiceOptions,
};
pub use clock::MonotonicUnixClock;
pub use command::{MasterStartError, RunningMaster, start};
pub use counters::{CallCounts, CallOutcome, LATENCY_BUCKETS, MIN_LATENCY_BOUND, RpcCounters, latency_bound};
pub use epochs::EpochHistory;
pub use persistence::PersistenceError;
pub use server::{HaState, LeadershipStatus, MasterRole, MasterServer, MasterServerOptions, RpcLimits};
pub use state::{AuxState, MasterState};
