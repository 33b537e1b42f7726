//! Registered memory through which a client's bytes go: registering a caller's own buffer for one transfer would take
//! longer than copying it.

use std::sync::Arc;

use moongate_memory::{Pages, Region};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::NoRdma;
use crate::fabric::{Fabric, Lent};

/// Bytes of a piece.
pub const PIECE: u64 = 4 << 20;

/// Pieces of registered memory.
#[derive(Debug)]
pub struct Staging {
    lent: Lent,
    region: Arc<Region>,
    free: Arc<Mutex<Vec<u64>>>,
    count: Arc<Semaphore>,
}

/// A piece that is in use. It is free again when it is dropped.
#[derive(Debug)]
pub struct Piece {
    offset: u64,
    free: Arc<Mutex<Vec<u64>>>,
    _permit: OwnedSemaphorePermit,
}

impl Staging {
    /// So many pieces, registered with all devices.
    ///
    /// # Errors
    /// [`NoRdma`].
    pub fn new(fabric: &Fabric, pieces: u32) -> Result<Self, NoRdma> {
        let region = Arc::new(Region::anonymous(u64::from(pieces) * PIECE, Pages::Transparent)?);
        let lent = fabric.lend(&region)?;
        let free = (0..u64::from(pieces)).map(|number| number * PIECE).collect();
        let count = Arc::new(Semaphore::new(pieces as usize));
        Ok(Self { lent, region, free: Arc::new(Mutex::new(free)), count })
    }

    /// A piece, as soon as one is free.
    pub async fn piece(&self) -> Piece {
        loop {
            // Never closed, and there are as many permits as pieces.
            let Ok(permit) = Arc::clone(&self.count).acquire_owned().await else { continue };
            if let Some(offset) = self.free.lock().pop() {
                return Piece { offset, free: Arc::clone(&self.free), _permit: permit };
            }
        }
    }

    /// The memory of all pieces.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Its registrations, in the order of the devices.
    #[must_use]
    pub fn lent(&self) -> &Lent {
        &self.lent
    }
}

impl Piece {
    /// Where it lies in the memory.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // Before the permit, whose next owner looks for a piece.
        self.free.lock().push(self.offset);
    }
}
