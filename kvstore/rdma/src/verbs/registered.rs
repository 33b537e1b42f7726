//! Memory registered with a device.
#![expect(unsafe_code, reason = "libibverbs is a C library")]

use std::io;
use std::ptr;
use std::sync::Arc;

use ibverbs_sys as sys;
use moongate_memory::MappedRegion;

use super::context::{VerbsContext, VerbsHandle};

/// Memory that a device, and peers that have the remote key, may read and write.
#[derive(Debug)]
pub struct RegisteredRegion {
    // Dropped before the memory and the device.
    handle: VerbsHandle<sys::ibv_mr>,
    region: Arc<MappedRegion>,
    _context: Arc<VerbsContext>,
}

impl RegisteredRegion {
    /// Registers a whole region. This pins its pages in memory.
    pub(crate) fn new(context: &Arc<VerbsContext>, region: Arc<MappedRegion>) -> io::Result<Self> {
        let access = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let start = ptr::with_exposed_provenance_mut(usize::try_from(region.base()).map_err(invalid)?);
        let len = usize::try_from(region.len()).map_err(invalid)?;
        let access = i32::try_from(access).map_err(invalid)?;
        // SAFETY: the region stays mapped longer than the registration, because `self` owns both. Devices and peers may write to it at any
        // time: a region hands out no references to its bytes.
        let handle = unsafe {
            let registered = sys::ibv_reg_mr(context.domain.pointer(), start, len, access);
            VerbsHandle::new(registered, sys::ibv_dereg_mr, "memory registration")?
        };
        Ok(Self { handle, region, _context: Arc::clone(context) })
    }

    /// The region that is registered.
    #[must_use]
    pub fn region(&self) -> &Arc<MappedRegion> {
        &self.region
    }

    /// Local key (`lkey`) for work requests of this process.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        // SAFETY: the registration exists as long as `self`, and the key does not change.
        unsafe { (*self.handle.pointer()).lkey }
    }

    /// Remote key (`rkey`) for work requests of peers.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        // SAFETY: as for the local key.
        unsafe { (*self.handle.pointer()).rkey }
    }
}
