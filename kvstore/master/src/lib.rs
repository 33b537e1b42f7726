//! A Mooncake-compatible master: what clients of every release of Mooncake talk to.
//!
//! The state machine is [`moongate_kvcore`]; here are its clock, its callers and its journal.
//!
//! - [`Server`]: the state machine with all that belongs to it.
//! - [`rpc`]: Mooncake's RPC port. [`call`]: from a request's bytes to the state machine and back.
//! - [`journal`]: where every change goes before anybody is told of it. [`durable`]: one that survives.
//! - [`ha`]: more than one master, of which one leads.
//! - [`flags`]: the command line of Mooncake's master. [`start`]: all of it together.
//! - [`http`]: the admin server. [`metadata`]: where clients find each other. [`events`]: what is published over ZeroMQ.

pub mod call;
mod capabilities;
mod clock;
mod command;
mod count;
mod dialects;
pub mod durable;
mod epochs;
pub mod events;
mod faces;
pub mod flags;
pub mod ha;
pub mod http;
pub mod journal;
mod kept;
pub mod metadata;
mod metrics;
mod object_feed;
pub mod observe;
mod presence;
pub mod quotas;
mod record;
mod releases;
pub mod rpc;
mod server;
mod state;
pub mod summary;
pub mod ticker;
mod upserts;

pub use clock::Clock;
pub use command::{RunningMaster, StartError, start};
pub use count::{CallCounts, Counters, LATENCY_BUCKETS, SHORTEST, Tally, latency_bound};
pub use epochs::Epochs;
pub use faces::{EventsFace, FaceAddresses, FaceError, Faces, FacesOptions, MetadataFace, MetadataPlace};
pub use kept::KeepError;
pub use server::{HaState, Limits, Role, Server, ServerOptions, Standing};
pub use state::{Beside, State};
