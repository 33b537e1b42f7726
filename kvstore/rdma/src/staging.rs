//! Registered memory that a client copies through: registering a caller's buffer per transfer would take longer than the copy.

use std::sync::Arc;

use moongate_memory::{MappedRegion, PageMode};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::RdmaSetupError;
use crate::fabric::{RdmaFabric, RegisteredMemory};

/// Bytes per chunk (4 MiB).
pub const STAGING_CHUNK: u64 = 4 << 20;

/// A pool of registered memory chunks.
#[derive(Debug)]
pub struct RdmaStaging {
    registration: RegisteredMemory,
    region: Arc<MappedRegion>,
    free: Arc<Mutex<Vec<u64>>>,
    count: Arc<Semaphore>,
}

/// A chunk in use, returned to the pool on drop.
#[derive(Debug)]
pub struct StagingChunk {
    offset: u64,
    free: Arc<Mutex<Vec<u64>>>,
    _permit: OwnedSemaphorePermit,
}

impl RdmaStaging {
    /// Allocates `chunks` chunks and registers them with all devices.
    ///
    /// # Errors
    /// [`RdmaSetupError`].
    pub fn new(fabric: &RdmaFabric, chunks: u32) -> Result<Self, RdmaSetupError> {
        let region =
            Arc::new(MappedRegion::anonymous(u64::from(chunks) * STAGING_CHUNK, PageMode::Transparent)?);
        let registration = fabric.register(&region)?;
        let free = (0..u64::from(chunks)).map(|number| number * STAGING_CHUNK).collect();
        let count = Arc::new(Semaphore::new(chunks as usize));
        Ok(Self { registration, region, free: Arc::new(Mutex::new(free)), count })
    }

    /// Takes a chunk; waits while none is free.
    pub async fn acquire_chunk(&self) -> StagingChunk {
        loop {
            // The semaphore is never closed, and has one permit per chunk.
            let Ok(permit) = Arc::clone(&self.count).acquire_owned().await else { continue };
            if let Some(offset) = self.free.lock().pop() {
                return StagingChunk { offset, free: Arc::clone(&self.free), _permit: permit };
            }
        }
    }

    /// The region that contains all chunks.
    #[must_use]
    pub fn region(&self) -> &MappedRegion {
        &self.region
    }

    /// The region's registrations, in device order.
    #[must_use]
    pub fn registration(&self) -> &RegisteredMemory {
        &self.registration
    }
}

impl StagingChunk {
    /// Offset of the chunk in the staging region.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Drop for StagingChunk {
    fn drop(&mut self) {
        // Push before the permit is released: its next owner pops a chunk.
        self.free.lock().push(self.offset);
    }
}
