//! A store node: contributes memory to a Mooncake store, and replaces Mooncake's own store service.
//!
//! [`start`] assembles a node: memory ([`moongate_memory`]), the data plane and the handshake port
//! ([`moongate_transfer`]), heartbeats on a dedicated thread, a worker for the master's copy and move tasks, and HTTP
//! servers for the REST API, health and metrics. Persistent memory is mounted again under the same ids, name and address.

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
mod http;
mod inventory;
mod listeners;
mod membership;
mod memory;
mod node;
mod peer;
mod rdma;
mod region_socket;
mod removal;
mod rest;
mod rest_response;
mod scrub;
mod segment_mounter;
mod segment_pool;
mod shared_memory;
pub mod size;
mod start_retry;
mod tasks;

pub use args::{NodeArgs, PageModeArg};
pub use config::{NodeConfig, NodeConfigError, NodeConfigFileError, NodeConfigValueError};
pub use error::NodeStartError;
pub use listeners::{HostResolutionError, NodeListenError};
pub use node::{RunningNode, start, start_without_http};
