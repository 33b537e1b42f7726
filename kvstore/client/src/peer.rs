//! The nodes that objects are on: their lanes, and how busy they are.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mooncake_wire::capability::Rights;
use moongate_transfer::{Connection, Directory, DirectoryError, Protocol, SegmentDescriptor, TransferError};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::checksum::Sum;
use crate::error::NodeError;
use crate::options::Options;
use crate::rdma::Rdma;

/// Nodes that are remembered at most. When there are more, the idle ones are forgotten.
const MOST_PEERS: usize = 4096;
/// What a step of distance weighs against bytes that are under way, so that a near node with a long queue is not
/// preferred for ever.
const STEP_BYTES: u64 = 4 << 20;
/// How long a node that failed is the last choice.
const SHUNNED: Duration = Duration::from_secs(1);

/// All nodes that this client has met.
#[derive(Debug)]
pub(crate) struct Peers {
    options: Options,
    directory: Directory,
    rdma: Rdma,
    peers: Mutex<HashMap<Arc<str>, Arc<Peer>>>,
    /// Bytes of all transfers that succeeded.
    moved: AtomicU64,
}

/// One node.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) endpoint: Arc<str>,
    distance: u32,
    /// Bytes of transfers that have begun or wait.
    outstanding: AtomicU64,
    lanes: Semaphore,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Lane>,
    place: Option<Arc<Place>>,
    failed: Option<Instant>,
    /// Whether the log says why there is no RDMA: several lanes may find it out.
    told_without_rdma: bool,
}

/// A connection on which nothing is under way.
#[derive(Debug)]
enum Lane {
    Tcp(Connection),
    Rdma(moongate_rdma::Connection),
}

/// A node's data port.
#[derive(Debug)]
struct Place {
    host: String,
    port: u16,
    protocol: Protocol,
}

/// What a transfer does.
pub(crate) enum Move<'a> {
    Read {
        into: &'a mut [u8],
        sum: &'a mut Sum,
        /// Whether this caller has nothing else to do meanwhile.
        is_all: bool,
    },
    Write(&'a [u8]),
}

impl Move<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Read { into, .. } => into.len(),
            Self::Write(from) => from.len(),
        }
    }

    fn rights(&self) -> Rights {
        match self {
            Self::Read { .. } => Rights::Read,
            Self::Write(_) => Rights::Write,
        }
    }

    async fn on(&mut self, lane: &mut Lane, address: u64) -> Result<(), TransferError> {
        match self {
            Self::Read { into, sum, is_all } => lane.read(address, into, sum, *is_all).await,
            Self::Write(from) => lane.write(address, from).await,
        }
    }
}

impl Lane {
    async fn read(
        &mut self,
        address: u64,
        into: &mut [u8],
        sum: &mut Sum,
        is_all: bool,
    ) -> Result<(), TransferError> {
        sum.restart();
        match self {
            Self::Tcp(connection) => {
                connection.stay_awake(is_all);
                connection.read_seen(address, into, |bytes| sum.add(bytes)).await
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
        connection.stay_awake(false);
        connection.write(address, from).await?;
        let (Protocol::V1, Some(last)) = (connection.protocol(), from.last()) else { return Ok(()) };
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
struct Booked<'a>(&'a AtomicU64, u64);

impl<'a> Booked<'a> {
    fn new(counter: &'a AtomicU64, bytes: usize) -> Self {
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
        Self(counter, bytes as u64)
    }
}

impl Drop for Booked<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Peers {
    pub(crate) fn new(options: Options) -> Result<Self, DirectoryError> {
        let tls = options.authentication.as_ref().map(|it| &it.tls);
        let directory = Directory::authenticated(&options.metadata, tls)?;
        let rdma = Rdma::new(options.rdma_devices.clone());
        Ok(Self { options, directory, rdma, peers: Mutex::default(), moved: AtomicU64::new(0) })
    }

    /// The node at `endpoint`, a `host:port`.
    pub(crate) fn get(&self, endpoint: &str) -> Arc<Peer> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(endpoint) {
            return Arc::clone(peer);
        }
        if peers.len() >= MOST_PEERS {
            peers.retain(|_, peer| Arc::strong_count(peer) > 1);
        }
        let endpoint: Arc<str> = endpoint.into();
        let peer = Arc::new(Peer {
            endpoint: Arc::clone(&endpoint),
            distance: self.options.locality.distance(&endpoint),
            outstanding: AtomicU64::new(0),
            lanes: Semaphore::new(self.options.lanes_per_node.max(1)),
            state: Mutex::default(),
        });
        peers.insert(endpoint, Arc::clone(&peer));
        peer
    }

    /// Bytes of all transfers that succeeded, until now.
    pub(crate) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Moves bytes between a caller's buffer and a node's memory.
    pub(crate) async fn transfer(
        &self,
        peer: &Peer,
        address: u64,
        mut what: Move<'_>,
    ) -> Result<(), NodeError> {
        let _booked = Booked::new(&peer.outstanding, what.len());
        // The semaphore is never closed.
        let _permit = peer.lanes.acquire().await;
        let moved = self.transfer_on_some_lane(peer, address, &mut what).await;
        match &moved {
            Ok(()) => _ = self.moved.fetch_add(what.len() as u64, Ordering::Relaxed),
            Err(_) => peer.failed(),
        }
        moved
    }

    async fn transfer_on_some_lane(
        &self,
        peer: &Peer,
        address: u64,
        what: &mut Move<'_>,
    ) -> Result<(), NodeError> {
        // A lane that lay idle may have died unnoticed. Then a new one shows whether the node lives.
        if let Some(mut lane) = peer.idle_lane() {
            self.present(peer, &mut lane, address, what);
            match what.on(&mut lane, address).await {
                Ok(()) => {
                    peer.give_back(lane);
                    return Ok(());
                }
                Err(error) if lane.is_outdated(&error) => peer.forget(),
                Err(source) => return Err(peer.error(source)),
            }
        }
        let mut lane = self.open(peer).await?;
        self.present(peer, &mut lane, address, what);
        what.on(&mut lane, address).await.map_err(|source| peer.error(source))?;
        peer.give_back(lane);
        Ok(())
    }

    /// Has a lane to a node that authenticates its peers send the capability for a transfer. Without one, the transfer fails.
    fn present(&self, peer: &Peer, lane: &mut Lane, address: u64, what: &Move<'_>) {
        let (Some(authentication), Lane::Tcp(connection)) = (&self.options.authentication, lane) else {
            return;
        };
        let size = what.len() as u64;
        connection.present(authentication.grants.find(&peer.endpoint, what.rights(), address, size));
    }

    async fn open(&self, peer: &Peer) -> Result<Lane, NodeError> {
        let known = peer.state.lock().place.clone();
        if let Some(place) = known {
            return self.open_at(peer, &place).await;
        }
        let descriptor = self.directory.descriptor(&peer.endpoint).await;
        let descriptor = Arc::new(descriptor.map_err(|error| peer.lookup(error.to_string()))?);
        if self.options.authentication.is_some() {
            let place = Arc::new(self.place(peer, &descriptor)?);
            peer.state.lock().place = Some(Arc::clone(&place));
            return self.open_at(peer, &place).await;
        }
        match self.rdma.connect(&self.directory, &descriptor, self.options.transfers).await {
            Ok(Some(connection)) => return Ok(Lane::Rdma(connection)),
            Ok(None) => {}
            Err(reason) => peer.tell_without_rdma(&reason),
        }
        let place = Arc::new(self.place(peer, &descriptor)?);
        // Asked once, until it turns out to be wrong.
        peer.state.lock().place = Some(Arc::clone(&place));
        self.open_at(peer, &place).await
    }

    async fn open_at(&self, peer: &Peer, place: &Place) -> Result<Lane, NodeError> {
        let limits = self.options.transfers;
        let opened = match &self.options.authentication {
            None => Connection::open(&place.host, place.port, place.protocol, limits).await,
            Some(it) => Connection::open_secured(&place.host, place.port, limits, &it.tls).await,
        };
        opened.map(Lane::Tcp).map_err(|source| {
            // It may have been restarted with another port.
            peer.forget();
            peer.error(source)
        })
    }

    /// Where the node's data port is.
    fn place(&self, peer: &Peer, descriptor: &SegmentDescriptor) -> Result<Place, NodeError> {
        let (host, port) =
            descriptor.data_address(&peer.endpoint).map_err(|error| peer.lookup(error.to_string()))?;
        Ok(Place { host, port, protocol: older(descriptor.protocol(), self.options.newest_protocol) })
    }
}

/// The older of two versions of the data plane.
fn older(one: Protocol, other: Protocol) -> Protocol {
    let ages = [Protocol::V1, Protocol::V2, Protocol::Checked];
    ages.into_iter().find(|version| [one, other].contains(version)).unwrap_or(one)
}

impl Peer {
    /// What it costs to read from it now: less is better.
    pub(crate) fn cost(&self) -> u64 {
        let failed = self.state.lock().failed.is_some_and(|at| at.elapsed() < SHUNNED);
        let busy = self.outstanding.load(Ordering::Relaxed);
        if failed {
            u64::MAX
        } else {
            busy.saturating_add(u64::from(self.distance).saturating_mul(STEP_BYTES))
        }
    }

    fn idle_lane(&self) -> Option<Lane> {
        let mut state = self.state.lock();
        let lane = state.idle.pop()?;
        if lane.is_of_old_certificate() {
            state.idle.clear();
            return None;
        }
        Some(lane)
    }

    fn give_back(&self, lane: Lane) {
        let mut state = self.state.lock();
        state.idle.push(lane);
        state.failed = None;
    }

    fn failed(&self) {
        self.state.lock().failed = Some(Instant::now());
    }

    /// Forgets its lanes and where it is.
    fn forget(&self) {
        let mut state = self.state.lock();
        state.idle.clear();
        state.place = None;
    }

    fn tell_without_rdma(&self, reason: &str) {
        if !std::mem::replace(&mut self.state.lock().told_without_rdma, true) {
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
        assert_eq!(older(Protocol::V2, Protocol::Checked), Protocol::V2);
        assert_eq!(older(Protocol::Checked, Protocol::V1), Protocol::V1);
        assert_eq!(older(Protocol::Checked, Protocol::Checked), Protocol::Checked);
    }
}
