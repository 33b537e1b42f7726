//! Mooncake's bytes, as its clients and its master exchange them. No sockets, no clocks, no state.
//!
//! - [`frame`]: the headers of `coro_rpc`, Mooncake's RPC transport.
//! - [`pack`]: values in the form of `struct_pack`, with their type literals and hashes.
//! - [`events`]: what engines and masters publish when pages come and go.
//! - [`types`] and [`rpc`]: every RPC of the master with its arguments and its reply.
//! - [`disk`]: the RPCs of a node with a disk.
//! - [`key`]: the names under which engines store pages of their KV cache.
//! - [`capability`]: what a peer may read or write, an extension between our own programs.
//! - [`whole`]: what nodes of ours tell masters of ours.
//! - [`admin`]: the JSON of the master's admin server.
//!
//! Mooncake's layouts change with nearly every release, and its version handshake does not tell. So every value
//! is read and written in a [`Dialect`]. In memory there is one type per thing, in the shape of the newest
//! release; what an older release lacks is left out when written and has its default when read.

pub mod admin;
pub mod capability;
mod dialect;
pub mod disk;
mod error;
pub mod events;
pub mod frame;
pub mod intact_ranges;
pub mod inventory;
pub mod key;
pub mod pack;
pub mod rpc;
pub mod types;

pub use dialect::{Dialect, DialectSet};
pub use error::ErrorCode;
