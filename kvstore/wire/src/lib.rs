//! Mooncake's wire formats, as its clients and its master exchange them, without sockets and clocks.
//!
//! - [`frame`]: the headers of `coro_rpc`, Mooncake's RPC transport.
//! - [`pack`]: values in `struct_pack` encoding, with their type literals and hashes.
//! - [`events`]: KV events of engines and masters.
//! - [`types`] and [`rpc`]: all RPCs of the master with arguments and replies.
//! - [`caller_dialect`]: which release the callers of a server have.
//! - [`disk`]: the RPCs of a node with a disk.
//! - [`key`]: the keys under which engines store blocks of their KV cache.
//! - [`capability`]: signed permissions for transfers, an extension between Moongate's programs.
//! - [`intact_ranges`] and [`inventory`]: RPCs between Moongate's nodes and masters. [`shards`]: RPCs about the masters of one store.
//! - [`admin`]: the JSON of the master's admin server.
//! - [`object_locations`]: readable objects with their locations, from a Moongate master's admin server.
//!
//! Mooncake's layouts change with nearly every release, and its version handshake does not identify them. So every value is read and
//! written in a [`Dialect`]. In memory there is one type per concept, with the fields of the newest release; fields that an older
//! release lacks are omitted when written and get their defaults when read.

pub mod admin;
pub mod caller_dialect;
pub mod capability;
mod dialect;
pub mod disk;
mod error;
pub mod events;
pub mod frame;
pub mod intact_ranges;
pub mod inventory;
pub mod key;
pub mod node_drain;
pub mod object_locations;
pub mod pack;
pub mod rpc;
pub mod shards;
pub mod types;

pub use dialect::{Dialect, DialectSet};
pub use error::ErrorCode;
