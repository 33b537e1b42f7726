//! Metadata client of a Mooncake-compatible KV store. It transfers no object data.
//!
//! - [`rpc`]: calls to the master, in the dialect of its release.
//! - [`admin`]: the master's HTTP server, which lists keys and locates objects without leasing them.
//! - [`nodes`]: liveness of store nodes, detected earlier than the master's heartbeat timeout.
//! - [`object_list`]: all readable objects and their locations, as fast as possible, from a Moongate master.
//! - [`snapshot`]: all blocks in the store and their locations, read at a limited rate to spare the master.

pub mod admin;
pub mod nodes;
pub mod object_list;
pub mod rpc;
pub mod snapshot;
