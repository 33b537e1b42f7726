//! A connection between two devices: a few queue pairs, over which reads and writes go in slices.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};

use crate::connection::{QUEUE_PAIRS, RemoteQueuePairs};
use crate::nic::{InFlightWorkRequest, Nic};
use crate::verbs::{QueuePair, RegisteredRegion, WorkRequest};

/// Bytes of a work request at most, as Mooncake has it.
pub const SLICE: u64 = 64 << 10;
/// Work requests of one queue pair that are under way at most.
const WINDOW: usize = 256;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdmaOperation {
    /// From the peer's memory.
    Read,
    /// Into the peer's memory.
    Write,
}

/// The peer's side of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Address of the first byte.
    pub address: u64,
    /// The key of the memory it lies in.
    pub key: u32,
}

/// This side of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct LocalMemory<'a> {
    /// The memory.
    pub memory: &'a Arc<RegisteredRegion>,
    /// Where in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// A transfer has failed, and the link with it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RdmaLinkError {
    /// A work request has failed.
    #[error("RDMA with {peer} has failed: {reason}")]
    Failed {
        /// The peer's device.
        peer: String,
        /// How.
        reason: String,
    },
    /// It has not got on.
    #[error("RDMA with {peer} has not got on for {limit:?}")]
    TimedOut {
        /// The peer's device.
        peer: String,
        /// The limit.
        limit: Duration,
    },
}

/// A connection between two devices.
#[derive(Debug)]
pub struct RdmaLink {
    id: u64,
    peer: String,
    nic: Arc<Nic>,
    pairs: Vec<(QueuePair, Arc<Semaphore>)>,
    broken: AtomicBool,
}

impl RdmaLink {
    /// Makes queue pairs, which are not connected yet.
    ///
    /// # Errors
    /// As the system says.
    pub fn new(nic: &Arc<Nic>, peer: String) -> io::Result<Self> {
        let pair = |_| Ok((QueuePair::create(&nic.context)?, Arc::new(Semaphore::new(WINDOW))));
        let pairs = (0..QUEUE_PAIRS).map(pair).collect::<io::Result<_>>()?;
        Ok(Self { id: nic.number(), peer, nic: Arc::clone(nic), pairs, broken: AtomicBool::new(false) })
    }

    /// The numbers of its queue pairs.
    #[must_use]
    pub fn numbers(&self) -> Vec<u32> {
        self.pairs.iter().map(|(pair, _)| pair.number()).collect()
    }

    /// Connects all queue pairs.
    ///
    /// # Errors
    /// As the system says.
    pub fn connect(&self, remote: &RemoteQueuePairs) -> io::Result<()> {
        for ((pair, _), number) in self.pairs.iter().zip(&remote.queue_pairs) {
            pair.connect(self.nic.device(), remote.lid, remote.gid, *number)?;
        }
        Ok(())
    }

    /// Whether it cannot be used any more.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Moves bytes, and returns when all have arrived. After an error the link is broken, and the memory must not be
    /// used for anything else before `guard` is dropped: it is kept until the device has done with the memory. Within
    /// `limit` at least a slice must get on.
    ///
    /// # Errors
    /// [`RdmaLinkError`].
    pub async fn transfer(
        &self,
        operation: RdmaOperation,
        local: LocalMemory<'_>,
        target: RemoteMemory,
        guard: Arc<dyn std::any::Any + Send + Sync>,
        limit: Duration,
    ) -> Result<(), RdmaLinkError> {
        let ended = self.slices(operation, local, target, guard, limit).await;
        if ended.is_err() {
            self.fail();
        }
        ended
    }

    async fn slices(
        &self,
        operation: RdmaOperation,
        local: LocalMemory<'_>,
        target: RemoteMemory,
        guard: Arc<dyn std::any::Any + Send + Sync>,
        limit: Duration,
    ) -> Result<(), RdmaLinkError> {
        let failed = |reason: String| RdmaLinkError::Failed { peer: self.peer.clone(), reason };
        let (told, mut ends) = mpsc::unbounded_channel();
        let mut posted = 0u64;
        for (number, (offset, len)) in slices(local.len).enumerate() {
            if self.is_broken() {
                return Err(failed("the link was broken before".to_owned()));
            }
            let Some((pair, window)) = self.pairs.get(number % self.pairs.len().max(1)) else { break };
            let room = self.with_timeout(limit, Arc::clone(window).acquire_owned()).await?;
            let room = room.map_err(|closed| failed(closed.to_string()))?;
            let space = self.with_timeout(limit, self.nic.space()).await?;
            let id = self.nic.number();
            let keep = Arc::new((Arc::clone(local.memory), Arc::clone(&guard)));
            let flight = InFlightWorkRequest {
                link: self.id,
                completion: told.clone(),
                queue_slot: room,
                memory: keep,
                completion_slot: space,
            };
            // Before the device has it, since the completion may come at once.
            self.nic.begin(id, flight);
            let work = WorkRequest {
                id,
                operation,
                memory: local.memory,
                offset: local.offset + offset,
                len,
                remote: target.address.wrapping_add(offset),
                remote_key: target.key,
            };
            if let Err(error) = pair.post(&work) {
                self.nic.cancel(id);
                return Err(failed(error.to_string()));
            }
            posted += 1;
            while let Ok(end) = ends.try_recv() {
                end.map_err(failed)?;
                posted -= 1;
            }
        }
        drop(told);
        while posted > 0 {
            let end = self.with_timeout(limit, ends.recv()).await?;
            end.unwrap_or_else(|| Err("its device is gone".to_owned())).map_err(failed)?;
            posted -= 1;
        }
        Ok(())
    }

    async fn with_timeout<T>(
        &self,
        limit: Duration,
        step: impl Future<Output = T>,
    ) -> Result<T, RdmaLinkError> {
        let ended = tokio::time::timeout(limit, step).await;
        ended.map_err(|_| RdmaLinkError::TimedOut { peer: self.peer.clone(), limit })
    }

    fn fail(&self) {
        self.broken.store(true, Ordering::Relaxed);
        for (pair, _) in &self.pairs {
            if let Err(error) = pair.fail() {
                tracing::debug!(peer = self.peer, %error, "a broken queue pair stays as it is");
            }
        }
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        // In this order: nothing completes any more when they are gone.
        self.pairs.clear();
        self.nic.remove_link(self.id);
    }
}

/// Offsets and lengths of the pieces of `len` bytes.
fn slices(len: u64) -> impl Iterator<Item = (u64, u32)> {
    // A slice is much smaller than 4 GiB.
    let piece = move |offset: u64| (offset, (len - offset).min(SLICE) as u32);
    (0..len.div_ceil(SLICE)).map(move |number| piece(number * SLICE))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn slices_are_the_whole(len in 0u64..10_000_000) {
            let mut end = 0;
            for (offset, piece) in slices(len) {
                prop_assert_eq!(offset, end);
                prop_assert!(piece > 0 && u64::from(piece) <= SLICE);
                end += u64::from(piece);
            }
            prop_assert_eq!(end, len);
        }
    }
}
