//! Memory of a node that clients on the same host map, so that they copy objects themselves instead of through sockets.
//!
//! A node's descriptor has the address of a UNIX socket. There a client gets the memory of a segment once ([`SharedMappings::get`]).
//! It then announces each transfer to the data plane ([`crate::plane`], protocol `Mapped`), which orders it with other transfers and
//! checks that the mapping is of the memory that the node has now.
//!
//! A process that has mapped the memory can write all of it, as peers of the data plane without TLS can.

mod client;
mod message;
mod server;
mod transfer;

use std::io;

use rustix::net::SocketAddrUnix;

pub use client::{SharedMapping, SharedMappingError, SharedMappings};
pub use server::{SharedMemory, SharedMemoryServer, SharedMemoryUsers, SharedSegment};

/// The socket with this name: a path, or `@` and an abstract name.
fn socket_address(name: &str) -> io::Result<SocketAddrUnix> {
    Ok(match name.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        None => SocketAddrUnix::new(name)?,
    })
}
