//! A store node: lends memory to a Mooncake store, in the place of Mooncake's own store service.
//!
//! [`start`] puts a node together: memory ([`moongate_memory`]), the data plane and the handshake port
//! ([`moongate_transfer`]), heartbeats on a thread of their own, a worker for the master's copies and moves, and HTTP
//! servers for people and for Prometheus. Memory that outlives the process is lent again under the ids, the name and
//! the address that it had.

mod access;
pub mod args;
mod capabilities;
mod catalog_sync;
pub mod config;
mod descriptor_publisher;
mod disk;
mod drain_hooks;
mod engine_segments;
mod error;
mod health;
mod heartbeat;
mod inventory;
mod listeners;
mod membership;
mod memory;
mod node;
mod peer;
mod rdma;
mod region_socket;
mod rest;
mod scrub;
mod segment_pool;
pub mod size;
mod start_retry;
mod tasks;

pub use args::{NodeArgs, PageModeArg};
pub use config::{NodeConfig, NodeConfigError};
pub use error::NodeStartError;
pub use listeners::NodeListenError;
pub use node::{RunningNode, start};
