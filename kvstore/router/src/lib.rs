//! One address for a store whose metadata is divided among several masters.
//!
//! Mooncake's clients call one master. The router accepts their connections, splits each call by shard, and merges the replies
//! (`moongate_store_shards`). It has no state of its own: any number of routers can serve one store, and a restart loses nothing.
//! Moongate's clients fetch the list of masters from it and call them directly.
//!
//! - `listener`: accepts connections. `connection`: the calls of one connection. `masters`: its connections to the shards.
//! - `admin`: HTTP, for all shards: keys, health, metrics.

mod admin;
mod connection;
mod counters;
mod listener;
mod masters;
mod metrics_text;
mod options;
mod segment_sizes;
mod start;

pub use options::RouterOptions;
pub use start::{RouterStartError, RunningRouter, start};
