//! All RDMA devices of a process, and their entries in its segment descriptor.

use std::io;
use std::path::Path;
use std::sync::Arc;

use moongate_memory::MappedRegion;
use moongate_transfer::{SegmentBuffer, SegmentDescriptor};

use crate::PROTOCOL;
use crate::device::{self, RdmaDeviceError, SYSFS};
use crate::error::{RdmaSetupError, UnusableDeviceError};
use crate::nic::Nic;
use crate::topology::{self, PriorityMatrix};
use crate::verbs::RegisteredRegion;

/// The opened RDMA devices of a process.
#[derive(Debug)]
pub struct RdmaFabric {
    nics: Vec<Arc<Nic>>,
    matrix: PriorityMatrix,
}

/// Memory that is registered with all devices of the process.
#[derive(Debug)]
pub struct RegisteredMemory {
    /// One registration per device, in device order.
    pub registered: Vec<Arc<RegisteredRegion>>,
    /// The priority matrix row of this memory.
    location: String,
}

impl RegisteredMemory {
    /// Sets the memory location and the keys in a descriptor's buffer.
    pub fn describe(&self, buffer: &mut SegmentBuffer) {
        buffer.name.clone_from(&self.location);
        buffer.rkey = self.registered.iter().map(|region| region.remote_key()).collect();
        buffer.lkey = self.registered.iter().map(|region| region.local_key()).collect();
    }
}

impl RdmaFabric {
    /// Opens the named devices, or all usable ones if `names` is empty.
    ///
    /// # Errors
    /// [`RdmaSetupError`].
    pub fn open(names: &[String]) -> Result<Self, RdmaSetupError> {
        let sysfs = Path::new(SYSFS);
        let listed = device::devices(sysfs).map_err(RdmaSetupError::ListDevices)?;
        if listed.is_empty() {
            return Err(RdmaSetupError::NoDevice);
        }
        let mut unusable: Vec<UnusableDeviceError> = names
            .iter()
            .filter(|name| listed.iter().all(|(listed, _)| listed != *name))
            .map(|name| UnusableDeviceError { device: name.clone(), source: RdmaDeviceError::Missing })
            .collect();
        let mut nics = Vec::new();
        for (name, found) in listed {
            if !names.is_empty() && !names.contains(&name) {
                continue;
            }
            match found.and_then(|device| Nic::open(device).map_err(RdmaDeviceError::Open)) {
                Ok(nic) => nics.push(nic),
                Err(source) => unusable.push(UnusableDeviceError { device: name, source }),
            }
        }
        if nics.is_empty() {
            return Err(RdmaSetupError::Unusable(unusable));
        }
        for error in unusable {
            tracing::warn!("RDMA device skipped: {error}");
        }
        let devices: Vec<_> = nics.iter().map(|nic| nic.device().clone()).collect();
        let matrix = topology::priority_matrix(&topology::memory_nodes(sysfs), &devices);
        Ok(Self { nics, matrix })
    }

    /// All opened devices, ordered by name.
    #[must_use]
    pub fn nics(&self) -> &[Arc<Nic>] {
        &self.nics
    }

    /// Registers memory with all devices, so that peers can read and write it.
    ///
    /// # Errors
    /// [`RdmaSetupError::Register`].
    pub fn register(&self, region: &Arc<MappedRegion>) -> Result<RegisteredMemory, RdmaSetupError> {
        let registered = self.nics.iter().map(|nic| nic.register(Arc::clone(region)));
        let registered = registered.collect::<io::Result<_>>().map_err(RdmaSetupError::Register)?;
        // Memory that is not bound to a NUMA node uses the first row: every row lists all devices.
        let location = self.matrix.keys().next().cloned().unwrap_or_default();
        Ok(RegisteredMemory { registered, location })
    }

    /// Adds the protocol, devices and priority matrix to a descriptor.
    pub fn describe(&self, descriptor: &mut SegmentDescriptor) {
        let device = |nic: &Arc<Nic>| moongate_transfer::DeviceDescriptor {
            name: nic.device().name.clone(),
            lid: nic.device().lid,
            gid: nic.device().gid.gid.to_string(),
        };
        descriptor.protocol = PROTOCOL.to_owned();
        descriptor.devices = self.nics.iter().map(device).collect();
        descriptor.priority_matrix = self.matrix.clone();
    }
}
