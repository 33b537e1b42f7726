//! All devices that a process uses, and how it describes itself to peers that have RDMA too.

use std::io;
use std::path::Path;
use std::sync::Arc;

use moongate_memory::MappedRegion;
use moongate_transfer::{SegmentBuffer, SegmentDescriptor};

use crate::PROTOCOL;
use crate::device::{self, SYSFS};
use crate::error::RdmaSetupError;
use crate::nic::Nic;
use crate::topology::{self, PriorityMatrix};
use crate::verbs::RegisteredRegion;

/// Devices at work.
#[derive(Debug)]
pub struct RdmaFabric {
    nics: Vec<Arc<Nic>>,
    matrix: PriorityMatrix,
}

/// Memory of a process that is registered with all of its devices.
#[derive(Debug)]
pub struct RegisteredMemory {
    /// In the order of the devices.
    pub registered: Vec<Arc<RegisteredRegion>>,
    /// The row of the priority matrix that is for this memory.
    location: String,
}

impl RegisteredMemory {
    /// Says in a descriptor's buffer where in memory it lies, and its keys.
    pub fn describe(&self, buffer: &mut SegmentBuffer) {
        buffer.name.clone_from(&self.location);
        buffer.rkey = self.registered.iter().map(|each| each.remote_key()).collect();
        buffer.lkey = self.registered.iter().map(|each| each.local_key()).collect();
    }
}

impl RdmaFabric {
    /// Opens the devices of these names; all that can be used if there are no names.
    ///
    /// # Errors
    /// [`RdmaSetupError`].
    pub fn open(names: &[String]) -> Result<Self, RdmaSetupError> {
        let sysfs = Path::new(SYSFS);
        let listed = device::devices(sysfs).map_err(RdmaSetupError::ListDevices)?;
        if listed.is_empty() {
            return Err(RdmaSetupError::NoDevice);
        }
        let mut reasons: Vec<String> = names
            .iter()
            .filter(|name| listed.iter().all(|(listed, _)| listed != *name))
            .map(|name| format!("{name}: there is no such device"))
            .collect();
        let mut nics = Vec::new();
        for (name, found) in listed {
            if !names.is_empty() && !names.contains(&name) {
                continue;
            }
            match found
                .map_err(|error| error.to_string())
                .and_then(|device| Nic::open(device).map_err(|error| error.to_string()))
            {
                Ok(nic) => nics.push(nic),
                Err(reason) => reasons.push(format!("{name}: {reason}")),
            }
        }
        if nics.is_empty() {
            return Err(RdmaSetupError::Unusable(reasons.join("; ")));
        }
        for reason in reasons {
            tracing::warn!("an RDMA device is not used: {reason}");
        }
        let devices: Vec<_> = nics.iter().map(|nic| nic.device().clone()).collect();
        let matrix = topology::priority_matrix(&topology::memory_nodes(sysfs), &devices);
        Ok(Self { nics, matrix })
    }

    /// The devices.
    #[must_use]
    pub fn nics(&self) -> &[Arc<Nic>] {
        &self.nics
    }

    /// Lets peers read and write memory through all devices.
    ///
    /// # Errors
    /// [`RdmaSetupError::Register`].
    pub fn register(&self, region: &Arc<MappedRegion>) -> Result<RegisteredMemory, RdmaSetupError> {
        let registered = self.nics.iter().map(|nic| nic.register(Arc::clone(region)));
        let registered = registered.collect::<io::Result<_>>().map_err(RdmaSetupError::Register)?;
        // Memory that is not bound to a node of the machine has the first row: all devices are in each.
        let place = self.matrix.keys().next().cloned().unwrap_or_default();
        Ok(RegisteredMemory { registered, location: place })
    }

    /// Says in a descriptor that the node has RDMA, over which devices.
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
