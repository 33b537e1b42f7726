//! A store node: lends memory to a Mooncake store, in the place of Mooncake's own store service.
//!
//! [`start`] puts a node together: memory ([`moongate_memory`]), the data plane and the handshake port
//! ([`moongate_transfer`]), heartbeats on a thread of their own, a worker for the master's copies and moves, and HTTP
//! servers for people and for Prometheus. Memory that outlives the process is lent again under the ids, the name and
//! the address that it had.

mod access;
mod capabilities;
mod catalog_sync;
pub mod config;
mod disk;
mod engines;
mod error;
pub mod flags;
mod health;
mod heartbeat;
mod hooks;
mod inventory;
mod membership;
mod memory;
mod node;
mod peer;
mod place;
mod pool;
mod presence;
mod rdma;
mod region_socket;
mod rest;
mod scrub;
pub mod size;
mod start_retry;
mod tasks;

pub use config::{Config, ConfigError};
pub use error::StartError;
pub use flags::{Flags, PageSize};
pub use node::{RunningStore, start};
pub use place::PlaceError;
