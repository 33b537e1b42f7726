//! A Mooncake-compatible master, which serves clients of every Mooncake release.
//!
//! The state machine is [`moongate_master_core`]; this crate adds its clock, its callers and its journal.
//!
//! - [`MasterServer`]: the state machine with its clock, journal and counters.
//! - [`rpc`]: Mooncake's RPC port. [`call`]: decodes a request and executes it. `reply`: encodes the reply, waits until the change is
//!   durable, and sends it.
//! - [`journal`]: stores every change before it is confirmed. [`durable`]: a journal on disk.
//! - [`ha`]: several masters with one leader.
//! - [`flags`]: the command line of Mooncake's master. [`start`] and [`start_ha`]: start all components.
//! - [`http`]: the admin server. [`metadata`]: addresses for transfers between clients. [`events`]: KV events over ZeroMQ.

mod aux_services;
pub mod call;
mod capabilities;
mod clock;
mod command;
mod counters;
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
mod query_string;
pub mod quotas;
mod record;
pub mod recorder;
pub mod recovery;
mod reply;
pub mod rpc;
mod rpc_stream;
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
pub use command::{
    HaStartError, MasterStartError, RunningHaMaster, RunningMaster, release_lease_after_exit, start, start_ha,
};
pub use counters::{CallCounts, CallOutcome, LATENCY_BUCKETS, MIN_LATENCY_BOUND, RpcCounters, latency_bound};
pub use epochs::{EpochHistory, LeaderEpoch, LogPosition};
pub use persistence::PersistenceError;
pub use server::{HaState, LeadershipStatus, MasterRole, MasterServer, MasterServerOptions, RpcLimits};
pub use state::{AuxState, MasterState};
