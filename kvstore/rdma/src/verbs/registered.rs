//! Memory that a device may read and write.
#![expect(unsafe_code, reason = "libibverbs is a C library")]

use std::io;
use std::ptr;
use std::sync::Arc;

use ibverbs_sys as sys;
use moongate_memory::MappedRegion;

use super::context::{VerbsContext, VerbsHandle};

/// Memory that a device, and through it peers that know the key, may read and write.
#[derive(Debug)]
pub struct RegisteredRegion {
    // Given back before the memory and the device.
    handle: VerbsHandle<sys::ibv_mr>,
    region: Arc<MappedRegion>,
    _context: Arc<VerbsContext>,
}

impl RegisteredRegion {
    /// Registers all of a region. Its pages stay in memory from now on.
    pub(crate) fn new(context: &Arc<VerbsContext>, region: Arc<MappedRegion>) -> io::Result<Self> {
        let access = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let start = ptr::with_exposed_provenance_mut(usize::try_from(region.base()).map_err(invalid)?);
        let len = usize::try_from(region.len()).map_err(invalid)?;
        let access = i32::try_from(access).map_err(invalid)?;
        // SAFETY: the region is mapped as long as it is kept here, which is longer than the registration. Devices and
        // peers may write it at any time: a region lends no references to its bytes.
        let handle = unsafe {
            let registered = sys::ibv_reg_mr(context.domain.pointer(), start, len, access);
            VerbsHandle::new(registered, sys::ibv_dereg_mr, "registration of memory")?
        };
        Ok(Self { handle, region, _context: Arc::clone(context) })
    }

    /// The memory.
    #[must_use]
    pub fn region(&self) -> &Arc<MappedRegion> {
        &self.region
    }

    /// The key by which this process names the memory to the device.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        // SAFETY: it is registered as long as `self`, and the key does not change.
        unsafe { (*self.handle.pointer()).lkey }
    }

    /// The key by which peers name it.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        // SAFETY: as for the local key.
        unsafe { (*self.handle.pointer()).rkey }
    }
}
