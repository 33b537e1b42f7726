//! The nodes that objects are on: their lanes, and how busy they are.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mooncake_wire::capability::AccessRights;
use moongate_transfer::{
    DescriptorDirectory, DirectoryError, SegmentDescriptor, TransferConnection, TransferError,
    TransferProtocol,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::checksum::RunningChecksum;
use crate::error::NodeError;
use crate::options::KvClientOptions;
use crate::rdma::RdmaDialer;

/// Nodes that are remembered at most. When there are more, the idle ones are forgotten.
const MAX_PEERS: usize = 4096;
/// What a step of distance weighs against bytes that are under way, so that a near node with a long queue is not
/// preferred for ever.
const BYTES_PER_DISTANCE: u64 = 4 << 20;
/// How long a node that failed is the last choice.
const FAILURE_COOLDOWN: Duration = Duration::from_secs(1);

/// All nodes that this client has met.
#[derive(Debug)]
pub(crate) struct PeerTable {
    options: KvClientOptions,
    directory: DescriptorDirectory,
    rdma: RdmaDialer,
    peers: Mutex<HashMap<Arc<str>, Arc<PeerNode>>>,
    /// Bytes of all transfers that succeeded.
    transferred_bytes: AtomicU64,
}

/// One node.
#[derive(Debug)]
pub(crate) struct PeerNode {
    pub(crate) endpoint: Arc<str>,
    distance: u32,
    /// Bytes of transfers that have begun or wait.
    outstanding: AtomicU64,
    connection_permits: Semaphore,
    state: Mutex<PeerState>,
}

#[derive(Debug, Default)]
struct PeerState {
    idle: Vec<PooledConnection>,
    data_endpoint: Option<Arc<DataEndpoint>>,
    failed: Option<Instant>,
    /// Whether the log says why there is no RDMA: several lanes may find it out.
    rdma_fallback_logged: bool,
}

/// A connection on which nothing is under way.
#[derive(Debug)]
enum PooledConnection {
    Tcp(TransferConnection),
    Rdma(moongate_rdma::RdmaConnection),
}

/// A node's data port.
#[derive(Debug)]
struct DataEndpoint {
    host: String,
    port: u16,
    protocol: TransferProtocol,
}

/// What a transfer does.
pub(crate) enum SliceTransfer<'a> {
    Read {
        into: &'a mut [u8],
        sum: &'a mut RunningChecksum,
        /// Whether this caller has nothing else to do meanwhile.
        may_busy_poll: bool,
    },
    Write(&'a [u8]),
}

impl SliceTransfer<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Read { into, .. } => into.len(),
            Self::Write(from) => from.len(),
        }
    }

    fn rights(&self) -> AccessRights {
        match self {
            Self::Read { .. } => AccessRights::Read,
            Self::Write(_) => AccessRights::Write,
        }
    }

    async fn run(&mut self, lane: &mut PooledConnection, address: u64) -> Result<(), TransferError> {
        match self {
            Self::Read { into, sum, may_busy_poll: is_all } => lane.read(address, into, sum, *is_all).await,
            Self::Write(from) => lane.write(address, from).await,
        }
    }
}

impl PooledConnection {
    async fn read(
        &mut self,
        address: u64,
        into: &mut [u8],
        sum: &mut RunningChecksum,
        is_all: bool,
    ) -> Result<(), TransferError> {
        sum.restart();
        match self {
            Self::Tcp(connection) => {
                connection.set_busy_poll(is_all);
                connection.read_with(address, into, |bytes| sum.add(bytes)).await
            }
            Self::Rdma(connection) => {
                connection.read(address, into).await?;
                sum.add(into);
                Ok(())
            }
        }
    }

    /// Writes, and returns when the node has applied it.
    async fn write(&mut self, address: u64, from: &[u8]) -> Result<(), TransferError> {
        let connection = match self {
            Self::Tcp(connection) => connection,
            Self::Rdma(connection) => return connection.write(address, from).await,
        };
        connection.set_busy_poll(false);
        connection.write(address, from).await?;
        let (TransferProtocol::V1, Some(last)) = (connection.protocol(), from.last()) else { return Ok(()) };
        // Version 1 does not tell when it has applied a write. But it does one thing after the other, so reading
        // the last byte tells.
        let (mut end, size) = ([0], from.len() as u64);
        connection.read(address.saturating_add(size - 1), &mut end).await?;
        if end == [*last] {
            return Ok(());
        }
        Err(TransferError::Checksum { address: connection.address().to_owned(), start: address, size })
    }

    /// Whether it was opened with a certificate that was renewed since: the node would refuse new capabilities.
    fn is_of_old_certificate(&self) -> bool {
        matches!(self, Self::Tcp(connection) if connection.is_of_old_certificate())
    }

    /// Whether a new lane may do what this one could not.
    fn is_outdated(&self, error: &TransferError) -> bool {
        match (self, error) {
            (_, TransferError::Broken { .. }) => true,
            // It knows the memory that the node lent when it was opened.
            (Self::Rdma(_), TransferError::Rejected { .. }) => true,
            _ => false,
        }
    }
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

    /// Bytes of all transfers that succeeded, until now.
    pub(crate) fn transferred_bytes(&self) -> u64 {
        self.transferred_bytes.load(Ordering::Relaxed)
    }

    /// Moves bytes between a caller's buffer and a node's memory.
    pub(crate) async fn transfer(
        &self,
        peer: &PeerNode,
        address: u64,
        mut what: SliceTransfer<'_>,
    ) -> Result<(), NodeError> {
        let _booked = OutstandingBytesGuard::new(&peer.outstanding, what.len());
        // The semaphore is never closed.
        let _permit = peer.connection_permits.acquire().await;
        let moved = self.transfer_once(peer, address, &mut what).await;
        match &moved {
            Ok(()) => _ = self.transferred_bytes.fetch_add(what.len() as u64, Ordering::Relaxed),
            Err(_) => peer.failed(),
        }
        moved
    }

    async fn transfer_once(
        &self,
        peer: &PeerNode,
        address: u64,
        what: &mut SliceTransfer<'_>,
    ) -> Result<(), NodeError> {
        // A lane that lay idle may have died unnoticed. Then a new one shows whether the node lives.
        if let Some(mut lane) = peer.idle_connection() {
            self.attach_capability(peer, &mut lane, address, what);
            match what.run(&mut lane, address).await {
                Ok(()) => {
                    peer.return_connection(lane);
                    return Ok(());
                }
                Err(error) if lane.is_outdated(&error) => peer.reset(),
                Err(source) => return Err(peer.error(source)),
            }
        }
        let mut lane = self.open(peer).await?;
        self.attach_capability(peer, &mut lane, address, what);
        what.run(&mut lane, address).await.map_err(|source| peer.error(source))?;
        peer.return_connection(lane);
        Ok(())
    }

    /// Has a lane to a node that authenticates its peers send the capability for a transfer. Without one, the transfer fails.
    fn attach_capability(
        &self,
        peer: &PeerNode,
        lane: &mut PooledConnection,
        address: u64,
        what: &SliceTransfer<'_>,
    ) {
        let (Some(authentication), PooledConnection::Tcp(connection)) = (&self.options.authentication, lane)
        else {
            return;
        };
        let size = what.len() as u64;
        connection.set_capability(authentication.grants.find(&peer.endpoint, what.rights(), address, size));
    }

    async fn open(&self, peer: &PeerNode) -> Result<PooledConnection, NodeError> {
        let known = peer.state.lock().data_endpoint.clone();
        if let Some(place) = known {
            return self.open_at(peer, &place).await;
        }
        let descriptor = self.directory.descriptor(&peer.endpoint).await;
        let descriptor = Arc::new(descriptor.map_err(|error| peer.lookup(error.to_string()))?);
        if self.options.authentication.is_some() {
            let place = Arc::new(self.data_endpoint(peer, &descriptor)?);
            peer.state.lock().data_endpoint = Some(Arc::clone(&place));
            return self.open_at(peer, &place).await;
        }
        match self.rdma.connect(&self.directory, &descriptor, self.options.transfers).await {
            Ok(Some(connection)) => return Ok(PooledConnection::Rdma(connection)),
            Ok(None) => {}
            Err(reason) => peer.warn_rdma_fallback(&reason),
        }
        let place = Arc::new(self.data_endpoint(peer, &descriptor)?);
        // Asked once, until it turns out to be wrong.
        peer.state.lock().data_endpoint = Some(Arc::clone(&place));
        self.open_at(peer, &place).await
    }

    async fn open_at(&self, peer: &PeerNode, place: &DataEndpoint) -> Result<PooledConnection, NodeError> {
        let limits = self.options.transfers;
        let opened = match &self.options.authentication {
            None => TransferConnection::open(&place.host, place.port, place.protocol, limits).await,
            Some(it) => TransferConnection::open_secured(&place.host, place.port, limits, &it.tls).await,
        };
        opened.map(PooledConnection::Tcp).map_err(|source| {
            // It may have been restarted with another port.
            peer.reset();
            peer.error(source)
        })
    }

    /// Where the node's data port is.
    fn data_endpoint(
        &self,
        peer: &PeerNode,
        descriptor: &SegmentDescriptor,
    ) -> Result<DataEndpoint, NodeError> {
        let (host, port) =
            descriptor.data_address(&peer.endpoint).map_err(|error| peer.lookup(error.to_string()))?;
        Ok(DataEndpoint {
            host,
            port,
            protocol: older_protocol(descriptor.protocol(), self.options.newest_protocol),
        })
    }
}

/// The older of two versions of the data plane.
fn older_protocol(one: TransferProtocol, other: TransferProtocol) -> TransferProtocol {
    let ages = [TransferProtocol::V1, TransferProtocol::V2, TransferProtocol::Checked];
    ages.into_iter().find(|version| [one, other].contains(version)).unwrap_or(one)
}

impl PeerNode {
    /// What it costs to read from it now: less is better.
    pub(crate) fn cost(&self) -> u64 {
        let failed = self.state.lock().failed.is_some_and(|at| at.elapsed() < FAILURE_COOLDOWN);
        let busy = self.outstanding.load(Ordering::Relaxed);
        if failed {
            u64::MAX
        } else {
            busy.saturating_add(u64::from(self.distance).saturating_mul(BYTES_PER_DISTANCE))
        }
    }

    fn idle_connection(&self) -> Option<PooledConnection> {
        let mut state = self.state.lock();
        let lane = state.idle.pop()?;
        if lane.is_of_old_certificate() {
            state.idle.clear();
            return None;
        }
        Some(lane)
    }

    fn return_connection(&self, lane: PooledConnection) {
        let mut state = self.state.lock();
        state.idle.push(lane);
        state.failed = None;
    }

    fn failed(&self) {
        self.state.lock().failed = Some(Instant::now());
    }

    /// Forgets its lanes and where it is.
    fn reset(&self) {
        let mut state = self.state.lock();
        state.idle.clear();
        state.data_endpoint = None;
    }

    fn warn_rdma_fallback(&self, reason: &str) {
        if !std::mem::replace(&mut self.state.lock().rdma_fallback_logged, true) {
            tracing::warn!(node = %self.endpoint, "no RDMA, transfers go over TCP: {reason}");
        }
    }

    fn lookup(&self, reason: String) -> NodeError {
        NodeError::Lookup { endpoint: Arc::clone(&self.endpoint), reason }
    }

    fn error(&self, source: TransferError) -> NodeError {
        NodeError::Transfer { endpoint: Arc::clone(&self.endpoint), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_must_know_a_version() {
        assert_eq!(older_protocol(TransferProtocol::V2, TransferProtocol::Checked), TransferProtocol::V2);
        assert_eq!(older_protocol(TransferProtocol::Checked, TransferProtocol::V1), TransferProtocol::V1);
        assert_eq!(
            older_protocol(TransferProtocol::Checked, TransferProtocol::Checked),
            TransferProtocol::Checked
        );
    }
}
