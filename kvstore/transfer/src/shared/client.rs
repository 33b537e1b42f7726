//! A client's mapping of a node's memory.

use std::io;
use std::sync::{Arc, Weak};
use std::thread;

use moongate_memory::packet_socket::PacketSocket;
use moongate_memory::{MappedRegion, RegionError};
use parking_lot::Mutex;

use super::message::{SharedMemoryRequest, SharedMemoryResponse};
use super::socket_address;
use crate::descriptor::SharedMemoryAddress;
use crate::plane::MappingId;

/// Memory of a segment of a node on this host.
#[derive(Debug)]
pub struct SharedMapping {
    pub(super) id: MappingId,
    base: u64,
    region: MappedRegion,
}

/// The mappings of a process, shared by its clients: each mapping of a large segment has page tables of its own.
///
/// A mapping keeps the memory allocated, so it ends when the node does, whether or not a client runs then.
#[derive(Clone, Debug, Default)]
pub struct SharedMappings {
    open: Arc<Mutex<Vec<OpenMapping>>>,
}

/// A mapping whose node has not ended.
#[derive(Debug)]
struct OpenMapping {
    process: String,
    mapping: Arc<SharedMapping>,
    /// Open as long as the node shares the segment.
    socket: Arc<PacketSocket>,
}

impl SharedMappings {
    /// The segment that has the byte at `start`, mapped once. Blocks for as long as the node needs to respond, ten seconds at most.
    /// Upgrade it for each transfer, so that the memory can be freed when the node has ended.
    ///
    /// # Errors
    /// [`SharedMappingError`].
    pub fn get(
        &self,
        address: &SharedMemoryAddress,
        start: u64,
    ) -> Result<Weak<SharedMapping>, SharedMappingError> {
        // Locked during the request, so that two clients do not map the same segment.
        let mut open = self.open.lock();
        let mut of_process = open.iter().filter(|entry| entry.process == address.process);
        if let Some(existing) = of_process.find(|entry| entry.mapping.contains(start, 1)) {
            return Ok(Arc::downgrade(&existing.mapping));
        }
        let (mapping, socket) = SharedMapping::request(address, start)?;
        let (mapping, socket) = (Arc::new(mapping), Arc::new(socket));
        let mapped = Arc::downgrade(&mapping);
        self.watch(&mapped, &socket).map_err(SharedMappingError::Thread)?;
        open.push(OpenMapping { process: address.process.clone(), mapping, socket });
        Ok(mapped)
    }

    /// Removes the mapping when the node closes the socket.
    fn watch(&self, mapping: &Weak<SharedMapping>, socket: &Arc<PacketSocket>) -> io::Result<()> {
        let (open, mapping) = (Arc::downgrade(&self.open), Weak::clone(mapping));
        let socket = Arc::clone(socket);
        let wait = move || {
            // An error is no reason to keep the memory.
            let _ = socket.wait_closed(None);
            if let Some(open) = open.upgrade() {
                open.lock().retain(|entry| !std::ptr::eq(Arc::as_ptr(&entry.mapping), mapping.as_ptr()));
            }
        };
        thread::Builder::new().name("shared-memory".to_owned()).spawn(wait).map(drop)
    }
}

impl Drop for OpenMapping {
    fn drop(&mut self) {
        // Ends its thread.
        self.socket.shut_down();
    }
}

/// Why a node's memory cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum SharedMappingError {
    /// No node listens there: it runs on another host or in another network namespace, or has ended.
    #[error("cannot connect to {socket}: {source}")]
    Unreachable { socket: String, source: io::Error },
    /// The node does not share the memory with this process.
    #[error("the node at {socket} does not share the memory: {reason}")]
    Refused { socket: String, reason: String },
    #[error("cannot map the memory: {0}")]
    Region(#[from] RegionError),
    #[error("cannot start the thread that waits for the end of the node: {0}")]
    Thread(io::Error),
}

impl SharedMapping {
    /// Maps the segment that has the byte at `start`.
    fn request(
        address: &SharedMemoryAddress,
        start: u64,
    ) -> Result<(Self, PacketSocket), SharedMappingError> {
        let exchange = || {
            let socket = PacketSocket::connect(&socket_address(&address.socket)?)?;
            let request = SharedMemoryRequest::Map { process: address.process.clone(), address: start };
            socket.send(&request, None)?;
            let (response, fd) = socket.receive()?;
            Ok((socket, response, fd))
        };
        let (socket, response, fd) = exchange()
            .map_err(|source| SharedMappingError::Unreachable { socket: address.socket.clone(), source })?;
        let refused = |reason: &str| SharedMappingError::Refused {
            socket: address.socket.clone(),
            reason: reason.to_owned(),
        };
        match (response, fd) {
            (SharedMemoryResponse::Segment { id, base, size }, Some(fd)) => {
                Ok((Self { id, base, region: MappedRegion::from_foreign_fd(fd, size)? }, socket))
            }
            (SharedMemoryResponse::Segment { .. }, None) => Err(refused("it sent no descriptor")),
            (SharedMemoryResponse::Refused { why }, _) => Err(refused(&why)),
        }
    }

    /// Whether it has all of these bytes.
    #[must_use]
    pub fn contains(&self, start: u64, size: u64) -> bool {
        start.checked_sub(self.base).is_some_and(|offset| self.region.check(offset, size).is_ok())
    }

    /// Maps the pages of a range that have none in this process.
    pub(super) fn populate(&self, start: u64, size: u64) {
        // The node has allocated them. If this fails, they are mapped one by one at their first use.
        if let Err(error) = self.region.populate(start.wrapping_sub(self.base), size) {
            tracing::debug!(%error, "cannot map the pages of shared memory in advance");
        }
    }

    /// Copies bytes out of the memory.
    pub(super) fn read(&self, start: u64, into: &mut [u8]) -> io::Result<()> {
        Ok(self.region.read_at(start.wrapping_sub(self.base), into)?)
    }

    /// Copies bytes into the memory.
    pub(super) fn write(&self, start: u64, from: &[u8]) -> io::Result<()> {
        Ok(self.region.write_at(start.wrapping_sub(self.base), from)?)
    }
}
