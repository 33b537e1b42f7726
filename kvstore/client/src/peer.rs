//! The nodes that objects are on: their lanes, and how busy they are.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::error::TransferError;
use crate::lane::{Lane, LaneError};
use crate::options::Options;
use crate::place::{Directory, Place};

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
    peers: Mutex<HashMap<Arc<str>, Arc<Peer>>>,
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
}

/// What a transfer does.
pub(crate) enum Move<'a> {
    Read(&'a mut [u8]),
    Write(&'a [u8]),
}

impl Move<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Read(into) => into.len(),
            Self::Write(from) => from.len(),
        }
    }

    async fn on(&mut self, lane: &mut Lane, address: u64) -> Result<(), LaneError> {
        match self {
            Self::Read(into) => lane.read(address, into).await,
            Self::Write(from) => lane.write(address, from).await,
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
    pub(crate) fn new(options: Options) -> Self {
        let directory = Directory::new(options.metadata.clone());
        Self { options, directory, peers: Mutex::default() }
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

    /// Moves bytes between a caller's buffer and a node's memory, within the time limit.
    pub(crate) async fn transfer(&self, peer: &Peer, address: u64, mut what: Move<'_>) -> Result<(), TransferError> {
        let length = what.len();
        let _booked = Booked::new(&peer.outstanding, length);
        let mebibytes = u32::try_from(length >> 20).unwrap_or(u32::MAX);
        let limit = self.options.transfer_limit + self.options.limit_per_mebibyte.saturating_mul(mebibytes);
        let moved = tokio::time::timeout(limit, self.transfer_on_some_lane(peer, address, &mut what)).await;
        let moved = moved.unwrap_or_else(|_| {
            Err(TransferError::TimedOut { endpoint: Arc::clone(&peer.endpoint), length, limit })
        });
        if moved.is_err() {
            peer.failed();
        }
        moved
    }

    async fn transfer_on_some_lane(
        &self,
        peer: &Peer,
        address: u64,
        what: &mut Move<'_>,
    ) -> Result<(), TransferError> {
        // The semaphore is never closed.
        let _permit = peer.lanes.acquire().await;
        // A lane that lay idle may have died unnoticed. Then a new one shows whether the node lives.
        if let Some(mut lane) = peer.idle_lane() {
            match what.on(&mut lane, address).await {
                Ok(()) => return Ok(peer.give_back(lane)),
                Err(LaneError::Broken(_)) => peer.forget(),
                Err(error) => return Err(peer.error(error, address, what.len())),
            }
        }
        let mut lane = self.open(peer).await?;
        match what.on(&mut lane, address).await {
            Ok(()) => Ok(peer.give_back(lane)),
            Err(error) => Err(peer.error(error, address, what.len())),
        }
    }

    async fn open(&self, peer: &Peer) -> Result<Lane, TransferError> {
        let endpoint = || Arc::clone(&peer.endpoint);
        let limit = self.options.connect_limit;
        let known = peer.state.lock().place.clone();
        let place = match known {
            Some(place) => place,
            None => {
                let found = tokio::time::timeout(limit, self.directory.place(&peer.endpoint)).await;
                let found = found.unwrap_or_else(|_| Err(format!("no answer within {limit:?}")));
                let place = found.map_err(|reason| TransferError::Lookup { endpoint: endpoint(), reason })?;
                let place = Arc::new(place);
                peer.state.lock().place = Some(Arc::clone(&place));
                place
            }
        };
        let opened = tokio::time::timeout(limit, Lane::open(&place.address, place.version)).await;
        opened.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())).map_err(|source| {
            // It may have been restarted with another port.
            peer.forget();
            let (host, port) = &place.address;
            TransferError::Unreachable {
                endpoint: endpoint(),
                address: format!("{host}:{port}"),
                source: Arc::new(source),
            }
        })
    }
}

impl Peer {
    /// What it costs to read from it now: less is better.
    pub(crate) fn cost(&self) -> u64 {
        let failed = self.state.lock().failed.is_some_and(|at| at.elapsed() < SHUNNED);
        let busy = self.outstanding.load(Ordering::Relaxed);
        if failed { u64::MAX } else { busy.saturating_add(u64::from(self.distance).saturating_mul(STEP_BYTES)) }
    }

    fn idle_lane(&self) -> Option<Lane> {
        self.state.lock().idle.pop()
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

    fn error(&self, error: LaneError, address: u64, length: usize) -> TransferError {
        let endpoint = Arc::clone(&self.endpoint);
        match error {
            LaneError::Broken(source) => TransferError::Broken { endpoint, source: Arc::new(source) },
            LaneError::Rejected => TransferError::Rejected { endpoint, address, length },
            LaneError::Damaged => TransferError::Damaged { endpoint, address },
            LaneError::Protocol => TransferError::Protocol { endpoint },
        }
    }
}
