//! Nodes that store objects: their pooled connections, and their load.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moongate_transfer::{
    DescriptorDirectory, DirectoryError, SegmentDescriptor, SharedMapping, TransferConnection, TransferError,
    TransferProtocol,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::error::{NodeError, NodeLookupError};
use crate::options::KvClientOptions;
use crate::rdma::{RdmaDialError, RdmaDialer};
use crate::shared_memory::{NodeMappings, RangeMapping};
use crate::slice_transfer::{PooledConnection, SliceTransfer};

/// Maximum number of cached nodes. When it is reached, idle ones are dropped.
const MAX_PEERS: usize = 4096;
/// Cost of one unit of distance in outstanding bytes, so that a near node with a long queue is not always preferred.
const BYTES_PER_DISTANCE: u64 = 4 << 20;
/// How long a node that failed is used only if there is no other.
const FAILURE_COOLDOWN: Duration = Duration::from_secs(1);

/// All nodes that this client has used.
#[derive(Debug)]
pub(crate) struct PeerTable {
    options: KvClientOptions,
    directory: DescriptorDirectory,
    rdma: RdmaDialer,
    peers: Mutex<HashMap<Arc<str>, Arc<PeerNode>>>,
    /// Bytes of all successful transfers.
    transferred_bytes: AtomicU64,
}

/// A node with its pool of connections.
#[derive(Debug)]
pub(crate) struct PeerNode {
    pub(crate) endpoint: Arc<str>,
    distance: u32,
    /// Bytes of transfers that are running or waiting for a connection.
    outstanding: AtomicU64,
    connection_permits: Semaphore,
    state: Mutex<PeerState>,
}

#[derive(Debug, Default)]
struct PeerState {
    idle: Vec<PooledConnection>,
    data_endpoint: Option<Arc<DataEndpoint>>,
    mappings: NodeMappings,
    failed: Option<Instant>,
    /// Whether the fallback to TCP was logged: several connections may fail for the same reason.
    rdma_fallback_logged: bool,
}

/// Address and protocol version of a node's data port.
#[derive(Debug)]
struct DataEndpoint {
    host: String,
    port: u16,
    protocol: TransferProtocol,
}

/// Counts bytes as outstanding until it is dropped.
struct OutstandingBytesGuard<'a>(&'a AtomicU64, u64);

impl<'a> OutstandingBytesGuard<'a> {
    fn new(counter: &'a AtomicU64, bytes: usize) -> Self {
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
        Self(counter, bytes as u64)
    }
}

impl Drop for OutstandingBytesGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl PeerTable {
    pub(crate) fn new(options: KvClientOptions) -> Result<Self, DirectoryError> {
        let tls = options.authentication.as_ref().map(|it| &it.tls);
        let directory = DescriptorDirectory::authenticated(&options.metadata, tls)?;
        let rdma = RdmaDialer::new(options.rdma_devices.clone());
        Ok(Self { options, directory, rdma, peers: Mutex::default(), transferred_bytes: AtomicU64::new(0) })
    }

    /// The node at `endpoint`, a `host:port`.
    pub(crate) fn get(&self, endpoint: &str) -> Arc<PeerNode> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(endpoint) {
            return Arc::clone(peer);
        }
        if peers.len() >= MAX_PEERS {
            peers.retain(|_, peer| Arc::strong_count(peer) > 1);
        }
        let endpoint: Arc<str> = endpoint.into();
        let peer = Arc::new(PeerNode {
            endpoint: Arc::clone(&endpoint),
            distance: self.options.locality.distance(&endpoint),
            outstanding: AtomicU64::new(0),
            connection_permits: Semaphore::new(self.options.connections_per_node.max(1)),
            state: Mutex::default(),
        });
        peers.insert(endpoint, Arc::clone(&peer));
        peer
    }

    /// Bytes of all successful transfers so far.
    pub(crate) fn transferred_bytes(&self) -> u64 {
        self.transferred_bytes.load(Ordering::Relaxed)
    }

    /// Transfers bytes between a caller's buffer and a node's memory.
    pub(crate) async fn transfer(
        &self,
        peer: &PeerNode,
        address: u64,
        mut what: SliceTransfer<'_, '_>,
    ) -> Result<(), NodeError> {
        let _outstanding = OutstandingBytesGuard::new(&peer.outstanding, what.len());
        // The semaphore is never closed.
        let _permit = peer.connection_permits.acquire().await;
        let result = self.transfer_once(peer, address, &mut what).await;
        match &result {
            Ok(()) => _ = self.transferred_bytes.fetch_add(what.len() as u64, Ordering::Relaxed),
            Err(_) => peer.failed(),
        }
        result
    }

    async fn transfer_once(
        &self,
        peer: &PeerNode,
        address: u64,
        what: &mut SliceTransfer<'_, '_>,
    ) -> Result<(), NodeError> {
        // An idle connection may have broken unnoticed. In that case a new one shows whether the node is reachable.
        if let Some(mut connection) = peer.idle_connection() {
            self.attach_capability(peer, &mut connection, address, what);
            let mapping = self.mapping(peer, address, what.len() as u64).await;
            match what.run(&mut connection, mapping.as_deref(), address).await {
                Ok(()) => {
                    peer.return_connection(connection);
                    return Ok(());
                }
                Err(error) if connection.is_outdated(&error) || mapping.is_some() => peer.reset(),
                Err(source) => return Err(peer.error(source)),
            }
        }
        let mut connection = self.open(peer).await?;
        self.attach_capability(peer, &mut connection, address, what);
        // Not through mapped memory, which may be why the first attempt failed.
        what.run(&mut connection, None, address).await.map_err(|source| peer.error(source))?;
        peer.return_connection(connection);
        Ok(())
    }

    /// With authentication, attaches the capability for a transfer to the connection. Without one, the transfer fails.
    fn attach_capability(
        &self,
        peer: &PeerNode,
        connection: &mut PooledConnection,
        address: u64,
        what: &SliceTransfer<'_, '_>,
    ) {
        let (Some(authentication), PooledConnection::Tcp(connection)) =
            (&self.options.authentication, connection)
        else {
            return;
        };
        let size = what.len() as u64;
        connection.set_capability(authentication.grants.find(&peer.endpoint, what.rights(), address, size));
    }

    async fn open(&self, peer: &PeerNode) -> Result<PooledConnection, NodeError> {
        let cached = peer.state.lock().data_endpoint.clone();
        if let Some(place) = cached {
            return self.open_at(peer, &place).await;
        }
        let descriptor = self.directory.descriptor(&peer.endpoint).await;
        let descriptor = Arc::new(descriptor.map_err(|error| peer.lookup(error))?);
        if self.options.authentication.is_some() {
            let place = Arc::new(self.data_endpoint(peer, &descriptor)?);
            peer.state.lock().data_endpoint = Some(Arc::clone(&place));
            return self.open_at(peer, &place).await;
        }
        match self.rdma.connect(&self.directory, &descriptor, self.options.transfers).await {
            Ok(Some(connection)) => return Ok(PooledConnection::Rdma(connection)),
            Ok(None) => {}
            Err(error) => peer.warn_rdma_fallback(&error),
        }
        let place = Arc::new(self.data_endpoint(peer, &descriptor)?);
        let can_map = self.options.shared_memory.is_some() && place.protocol == TransferProtocol::Checked;
        let shared = descriptor.moongate_shared_memory.clone().filter(|_| can_map);
        // Cached until a connection to it fails.
        {
            let mut state = peer.state.lock();
            state.data_endpoint = Some(Arc::clone(&place));
            state.mappings = NodeMappings::none(shared);
        }
        self.open_at(peer, &place).await
    }

    async fn open_at(&self, peer: &PeerNode, place: &DataEndpoint) -> Result<PooledConnection, NodeError> {
        let limits = self.options.transfers;
        let opened = match &self.options.authentication {
            None => TransferConnection::open(&place.host, place.port, place.protocol, limits).await,
            Some(it) => TransferConnection::open_secured(&place.host, place.port, limits, &it.tls).await,
        };
        opened.map(PooledConnection::Tcp).map_err(|source| {
            // The node may have restarted with another port.
            peer.reset();
            peer.error(source)
        })
    }

    /// The mapping of a range of the node's memory, if it can be had.
    async fn mapping(&self, peer: &PeerNode, address: u64, size: u64) -> Option<Arc<SharedMapping>> {
        let mappings = self.options.shared_memory.clone()?;
        let place = match peer.state.lock().mappings.find(address, size) {
            RangeMapping::Mapped(mapping) => return Some(mapping),
            RangeMapping::Request(place) => place,
            RangeMapping::NotShared => return None,
        };
        let requested = tokio::task::spawn_blocking(move || mappings.get(&place, address)).await;
        let mapping = match requested {
            Ok(Ok(mapping)) => Some(mapping),
            Ok(Err(error)) => {
                tracing::debug!(node = %peer.endpoint, "objects are copied through sockets: {error}");
                None
            }
            // The runtime shuts down.
            Err(_) => None,
        };
        peer.state.lock().mappings.requested(mapping.clone());
        mapping.and_then(|mapping| mapping.upgrade()).filter(|mapping| mapping.contains(address, size))
    }

    /// Extracts the data port from the node's descriptor.
    fn data_endpoint(
        &self,
        peer: &PeerNode,
        descriptor: &SegmentDescriptor,
    ) -> Result<DataEndpoint, NodeError> {
        let (host, port) = descriptor.data_address(&peer.endpoint).map_err(|error| peer.lookup(error))?;
        Ok(DataEndpoint {
            host,
            port,
            protocol: older_protocol(descriptor.protocol(), self.options.newest_protocol),
        })
    }
}

/// The older of two versions of the data plane.
fn older_protocol(one: TransferProtocol, other: TransferProtocol) -> TransferProtocol {
    let by_age = [TransferProtocol::V1, TransferProtocol::V2, TransferProtocol::Checked];
    by_age.into_iter().find(|version| [one, other].contains(version)).unwrap_or(one)
}

impl PeerNode {
    /// Estimated cost of a read in bytes: outstanding bytes plus distance. `u64::MAX` after a recent failure.
    pub(crate) fn cost(&self) -> u64 {
        let failed = self.state.lock().failed.is_some_and(|failed_at| failed_at.elapsed() < FAILURE_COOLDOWN);
        let busy = self.outstanding.load(Ordering::Relaxed);
        if failed {
            u64::MAX
        } else {
            busy.saturating_add(u64::from(self.distance).saturating_mul(BYTES_PER_DISTANCE))
        }
    }

    /// Whether the node is on this host.
    pub(crate) fn is_local(&self) -> bool {
        self.distance == 0
    }

    fn idle_connection(&self) -> Option<PooledConnection> {
        let mut state = self.state.lock();
        let connection = state.idle.pop()?;
        if connection.is_of_old_certificate() {
            state.idle.clear();
            return None;
        }
        Some(connection)
    }

    fn return_connection(&self, connection: PooledConnection) {
        let mut state = self.state.lock();
        state.idle.push(connection);
        state.failed = None;
    }

    fn failed(&self) {
        self.state.lock().failed = Some(Instant::now());
    }

    /// Drops the idle connections and the cached data port.
    fn reset(&self) {
        let mut state = self.state.lock();
        state.idle.clear();
        state.data_endpoint = None;
        state.mappings = NodeMappings::default();
    }

    fn warn_rdma_fallback(&self, error: &RdmaDialError) {
        if !std::mem::replace(&mut self.state.lock().rdma_fallback_logged, true) {
            tracing::warn!(node = %self.endpoint, "RDMA is not available, transfers use TCP: {error}");
        }
    }

    fn lookup(&self, error: impl Into<NodeLookupError>) -> NodeError {
        NodeError::Lookup { endpoint: Arc::clone(&self.endpoint), source: Box::new(error.into()) }
    }

    fn error(&self, source: TransferError) -> NodeError {
        NodeError::Transfer { endpoint: Arc::clone(&self.endpoint), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_of_both_protocol_versions_is_used() {
        assert_eq!(older_protocol(TransferProtocol::V2, TransferProtocol::Checked), TransferProtocol::V2);
        assert_eq!(older_protocol(TransferProtocol::Checked, TransferProtocol::V1), TransferProtocol::V1);
        assert_eq!(
            older_protocol(TransferProtocol::Checked, TransferProtocol::Checked),
            TransferProtocol::Checked
        );
    }
}
