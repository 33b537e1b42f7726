//! Connections to nodes that serve transfers over RDMA.

use std::sync::{Arc, OnceLock};

use moongate_rdma::{PROTOCOL, RdmaConnection, RdmaFabric, RdmaSetupError, RdmaStaging};
use moongate_transfer::{DescriptorDirectory, SegmentDescriptor, TransferLimits};

/// Pieces of memory through which the bytes of all transfers go. Each is 4 MiB, a slice of an object.
const STAGING_CHUNKS: u32 = 16;

/// This process's devices. They are opened when the first node is met that has RDMA.
#[derive(Debug)]
pub(crate) struct RdmaDialer {
    names: Vec<String>,
    devices: OnceLock<Option<OpenRdmaDevices>>,
}

#[derive(Debug)]
struct OpenRdmaDevices {
    fabric: RdmaFabric,
    staging: Arc<RdmaStaging>,
    /// What nodes know this process by. No other has the same name.
    local_name: String,
}

impl OpenRdmaDevices {
    fn open(names: &[String]) -> Result<Self, RdmaSetupError> {
        let fabric = RdmaFabric::open(names)?;
        let staging = Arc::new(RdmaStaging::new(&fabric, STAGING_CHUNKS)?);
        Ok(Self { fabric, staging, local_name: format!("moongate-{:016x}", fastrand::u64(..)) })
    }
}

impl RdmaDialer {
    /// Over the devices of these names, or all that the machine has.
    pub(crate) fn new(names: Vec<String>) -> Self {
        Self { names, devices: OnceLock::new() }
    }

    /// A connection to a node, unless it or this machine has no RDMA; the latter is told in the log.
    ///
    /// # Errors
    /// Why there can be none although both have it.
    pub(crate) async fn connect(
        &self,
        directory: &DescriptorDirectory,
        descriptor: &Arc<SegmentDescriptor>,
        limits: TransferLimits,
    ) -> Result<Option<RdmaConnection>, String> {
        if descriptor.protocol != PROTOCOL {
            return Ok(None);
        }
        let devices = self.devices.get_or_init(|| {
            let opened = OpenRdmaDevices::open(&self.names);
            opened.inspect_err(|error| tracing::warn!("no RDMA, transfers go over TCP: {error}")).ok()
        });
        let Some(OpenRdmaDevices { fabric, staging, local_name: own }) = devices else { return Ok(None) };
        let handshakes = directory.handshakes(&descriptor.name).await.map_err(|error| error.to_string())?;
        let (staging, descriptor) = (Arc::clone(staging), Arc::clone(descriptor));
        let opened = RdmaConnection::open(fabric, staging, own, &handshakes, descriptor, limits).await;
        opened.map(Some).map_err(|error| error.to_string())
    }
}
