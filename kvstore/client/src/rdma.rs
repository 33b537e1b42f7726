//! RDMA connections to nodes.

use std::sync::{Arc, OnceLock};

use moongate_rdma::{PROTOCOL, RdmaConnectError, RdmaConnection, RdmaFabric, RdmaSetupError, RdmaStaging};
use moongate_transfer::{DescriptorDirectory, DirectoryError, SegmentDescriptor, TransferLimits};

/// Number of registered staging chunks shared by all transfers. Each is 4 MiB, the size of a slice.
const STAGING_CHUNKS: u32 = 16;

/// Why no RDMA connection to a node could be opened, although both sides have RDMA.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RdmaDialError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Connect(#[from] RdmaConnectError),
}

/// Opens this process's RDMA devices on first use, and connects to nodes over them.
#[derive(Debug)]
pub(crate) struct RdmaDialer {
    names: Vec<String>,
    devices: OnceLock<Option<OpenRdmaDevices>>,
}

#[derive(Debug)]
struct OpenRdmaDevices {
    fabric: RdmaFabric,
    staging: Arc<RdmaStaging>,
    /// Random name by which nodes identify this process.
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
    /// Uses the devices with these names, or all devices if empty.
    pub(crate) fn new(names: Vec<String>) -> Self {
        Self { names, devices: OnceLock::new() }
    }

    /// Connects to a node. `None` if the node or this machine has no RDMA; the latter is logged.
    ///
    /// # Errors
    /// When both have RDMA and the connection fails.
    pub(crate) async fn connect(
        &self,
        directory: &DescriptorDirectory,
        descriptor: &Arc<SegmentDescriptor>,
        limits: TransferLimits,
    ) -> Result<Option<RdmaConnection>, RdmaDialError> {
        if descriptor.protocol != PROTOCOL {
            return Ok(None);
        }
        let devices = self.devices.get_or_init(|| {
            let opened = OpenRdmaDevices::open(&self.names);
            opened
                .inspect_err(|error| tracing::warn!("RDMA is not available, transfers use TCP: {error}"))
                .ok()
        });
        let Some(OpenRdmaDevices { fabric, staging, local_name }) = devices else { return Ok(None) };
        let handshakes = directory.handshakes(&descriptor.name).await?;
        let (staging, descriptor) = (Arc::clone(staging), Arc::clone(descriptor));
        let opened = RdmaConnection::open(fabric, staging, local_name, &handshakes, descriptor, limits).await;
        Ok(Some(opened?))
    }
}
