//! A connection between two devices: a few queue pairs, over which transfers are sent in slices.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};

use crate::connection::{QUEUE_PAIRS, RemoteQueuePairs};
use crate::nic::{InFlightWorkRequest, Nic};
use crate::verbs::{QueuePair, RegisteredRegion, WorkCompletionError, WorkRequest};

/// Maximum bytes of a work request, as in Mooncake.
pub const SLICE: u64 = 64 << 10;
/// Maximum number of work requests in flight per queue pair.
const WINDOW: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdmaOperation {
    /// From the peer's memory to this process.
    Read,
    /// From this process into the peer's memory.
    Write,
}

/// Remote end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// Address of the first byte.
    pub address: u64,
    /// Remote key (`rkey`) of the memory.
    pub key: u32,
}

/// Local end of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct LocalMemory<'a> {
    /// The registered region that contains the range.
    pub memory: &'a Arc<RegisteredRegion>,
    /// Offset of the range in the region.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
}

/// A transfer failed, and its link is broken.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RdmaLinkError {
    /// A work request completed with an error.
    #[error("RDMA transfer with {peer} failed: {source}")]
    Failed {
        /// Path of the peer's device.
        peer: String,
        source: WorkRequestError,
    },
    /// No work request completed within the limit.
    #[error("RDMA transfer with {peer} made no progress for {limit:?}")]
    TimedOut {
        /// Path of the peer's device.
        peer: String,
        /// The stall limit of the transfer.
        limit: Duration,
    },
}

/// Why a work request failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WorkRequestError {
    /// An earlier transfer failed.
    #[error("the link is already broken")]
    LinkBroken,
    #[error("the device was closed")]
    DeviceClosed,
    /// libibverbs did not accept it.
    #[error("{0}")]
    Post(#[source] Arc<io::Error>),
    #[error(transparent)]
    Completion(#[from] WorkCompletionError),
}

/// A connection between a local and a remote device.
#[derive(Debug)]
pub struct RdmaLink {
    id: u64,
    peer: String,
    nic: Arc<Nic>,
    pairs: Vec<(QueuePair, Arc<Semaphore>)>,
    broken: AtomicBool,
}

impl RdmaLink {
    /// Creates queue pairs that are not connected yet.
    ///
    /// # Errors
    /// Errors of libibverbs.
    pub fn new(nic: &Arc<Nic>, peer: String) -> io::Result<Self> {
        let pair = |_| Ok((QueuePair::create(&nic.context)?, Arc::new(Semaphore::new(WINDOW))));
        let pairs = (0..QUEUE_PAIRS).map(pair).collect::<io::Result<_>>()?;
        Ok(Self { id: nic.number(), peer, nic: Arc::clone(nic), pairs, broken: AtomicBool::new(false) })
    }

    /// Numbers of the link's queue pairs.
    #[must_use]
    pub fn numbers(&self) -> Vec<u32> {
        self.pairs.iter().map(|(pair, _)| pair.number()).collect()
    }

    /// Connects all queue pairs to those of `remote`.
    ///
    /// # Errors
    /// Errors of libibverbs.
    pub fn connect(&self, remote: &RemoteQueuePairs) -> io::Result<()> {
        for ((pair, _), number) in self.pairs.iter().zip(&remote.queue_pairs) {
            pair.connect(self.nic.device(), remote.lid, remote.gid, *number)?;
        }
        Ok(())
    }

    /// Whether a transfer failed, so the link is unusable.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Transfers bytes and returns when all have arrived. After an error the link is broken, and the device may still access the memory
    /// until `guard` is dropped, so it must not be reused before. At least one slice must complete within `limit`.
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
        let result = self.transfer_slices(operation, local, target, guard, limit).await;
        if result.is_err() {
            self.fail();
        }
        result
    }

    async fn transfer_slices(
        &self,
        operation: RdmaOperation,
        local: LocalMemory<'_>,
        target: RemoteMemory,
        guard: Arc<dyn std::any::Any + Send + Sync>,
        limit: Duration,
    ) -> Result<(), RdmaLinkError> {
        let failed = |source| RdmaLinkError::Failed { peer: self.peer.clone(), source };
        let (completion, mut completions) = mpsc::unbounded_channel();
        let mut posted = 0u64;
        for (number, (offset, len)) in slices(local.len).enumerate() {
            if self.is_broken() {
                return Err(failed(WorkRequestError::LinkBroken));
            }
            let Some((pair, window)) = self.pairs.get(number % self.pairs.len().max(1)) else { break };
            let queue_slot = self.with_timeout(limit, Arc::clone(window).acquire_owned()).await?;
            let queue_slot = queue_slot.map_err(|_| failed(WorkRequestError::DeviceClosed))?;
            let completion_slot = self.with_timeout(limit, self.nic.reserve_completion()).await?;
            let id = self.nic.number();
            let memory = Arc::new((Arc::clone(local.memory), Arc::clone(&guard)));
            let in_flight = InFlightWorkRequest {
                link: self.id,
                completion: completion.clone(),
                queue_slot,
                memory,
                completion_slot,
            };
            // Registered before posting, since the completion may arrive at once.
            self.nic.begin(id, in_flight);
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
                return Err(failed(WorkRequestError::Post(Arc::new(error))));
            }
            posted += 1;
            while let Ok(result) = completions.try_recv() {
                result.map_err(|error| failed(error.into()))?;
                posted -= 1;
            }
        }
        drop(completion);
        while posted > 0 {
            let result = self.with_timeout(limit, completions.recv()).await?;
            result.ok_or(WorkRequestError::DeviceClosed).and_then(|it| Ok(it?)).map_err(failed)?;
            posted -= 1;
        }
        Ok(())
    }

    async fn with_timeout<T>(
        &self,
        limit: Duration,
        step: impl Future<Output = T>,
    ) -> Result<T, RdmaLinkError> {
        let result = tokio::time::timeout(limit, step).await;
        result.map_err(|_| RdmaLinkError::TimedOut { peer: self.peer.clone(), limit })
    }

    fn fail(&self) {
        self.broken.store(true, Ordering::Relaxed);
        for (pair, _) in &self.pairs {
            if let Err(error) = pair.fail() {
                tracing::debug!(peer = self.peer, %error, "cannot move a queue pair to the error state");
            }
        }
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        // In this order: destroyed queue pairs produce no more completions.
        self.pairs.clear();
        self.nic.remove_link(self.id);
    }
}

/// Offsets and lengths of the slices of `len` bytes.
fn slices(len: u64) -> impl Iterator<Item = (u64, u32)> {
    // A slice is far below 4 GiB.
    let slice = move |offset: u64| (offset, (len - offset).min(SLICE) as u32);
    (0..len.div_ceil(SLICE)).map(move |number| slice(number * SLICE))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn slices_cover_the_whole_range(len in 0u64..10_000_000) {
            let mut end = 0;
            for (offset, size) in slices(len) {
                prop_assert_eq!(offset, end);
                prop_assert!(size > 0 && u64::from(size) <= SLICE);
                end += u64::from(size);
            }
            prop_assert_eq!(end, len);
        }
    }
}
