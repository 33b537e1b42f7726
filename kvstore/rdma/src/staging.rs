//! Registered memory through which a client's bytes go: registering a caller's own buffer for one transfer would take
//! longer than copying it.

use std::sync::Arc;

use moongate_memory::{MappedRegion, PageMode};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::RdmaSetupError;
use crate::fabric::{RdmaFabric, RegisteredMemory};

/// Bytes of a piece.
pub const STAGING_CHUNK: u64 = 4 << 20;

/// Pieces of registered memory.
#[derive(Debug)]
pub struct RdmaStaging {
    registration: RegisteredMemory,
    region: Arc<MappedRegion>,
    free: Arc<Mutex<Vec<u64>>>,
    count: Arc<Semaphore>,
}

/// A piece that is in use. It is free again when it is dropped.
#[derive(Debug)]
pub struct StagingChunk {
    offset: u64,
    free: Arc<Mutex<Vec<u64>>>,
    _permit: OwnedSemaphorePermit,
}

impl RdmaStaging {
    /// So many pieces, registered with all devices.
    ///
    /// # Errors
    /// [`RdmaSetupError`].
    pub fn new(fabric: &RdmaFabric, pieces: u32) -> Result<Self, RdmaSetupError> {
        let region =
            Arc::new(MappedRegion::anonymous(u64::from(pieces) * STAGING_CHUNK, PageMode::Transparent)?);
        let lent = fabric.register(&region)?;
        let free = (0..u64::from(pieces)).map(|number| number * STAGING_CHUNK).collect();
        let count = Arc::new(Semaphore::new(pieces as usize));
        Ok(Self { registration: lent, region, free: Arc::new(Mutex::new(free)), count })
    }

    /// A piece, as soon as one is free.
    pub async fn acquire_chunk(&self) -> StagingChunk {
        loop {
            // Never closed, and there are as many permits as pieces.
            let Ok(permit) = Arc::clone(&self.count).acquire_owned().await else { continue };
            if let Some(offset) = self.free.lock().pop() {
                return StagingChunk { offset, free: Arc::clone(&self.free), _permit: permit };
            }
        }
    }

    /// The memory of all pieces.
    #[must_use]
    pub fn region(&self) -> &MappedRegion {
        &self.region
    }

    /// Its registrations, in the order of the devices.
    #[must_use]
    pub fn registration(&self) -> &RegisteredMemory {
        &self.registration
    }
}

impl StagingChunk {
    /// Where it lies in the memory.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Drop for StagingChunk {
    fn drop(&mut self) {
        // Before the permit, whose next owner looks for a piece.
        self.free.lock().push(self.offset);
    }
}
