//! Connections to nodes that serve transfers over RDMA.

use std::sync::{Arc, OnceLock};

use moongate_rdma::{Connection, Fabric, NoRdma, PROTOCOL, Staging};
use moongate_transfer::{Directory, Limits, SegmentDescriptor};

/// Pieces of memory through which the bytes of all transfers go. Each is 4 MiB, a slice of an object.
const PIECES: u32 = 16;

/// This process's devices. They are opened when the first node is met that has RDMA.
#[derive(Debug)]
pub(crate) struct Rdma {
    names: Vec<String>,
    devices: OnceLock<Option<Devices>>,
}

#[derive(Debug)]
struct Devices {
    fabric: Fabric,
    staging: Arc<Staging>,
    /// What nodes know this process by. No other has the same name.
    own: String,
}

impl Devices {
    fn open(names: &[String]) -> Result<Self, NoRdma> {
        let fabric = Fabric::open(names)?;
        let staging = Arc::new(Staging::new(&fabric, PIECES)?);
        Ok(Self { fabric, staging, own: format!("moongate-{:016x}", fastrand::u64(..)) })
    }
}

impl Rdma {
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
        directory: &Directory,
        descriptor: &Arc<SegmentDescriptor>,
        limits: Limits,
    ) -> Result<Option<Connection>, String> {
        if descriptor.protocol != PROTOCOL {
            return Ok(None);
        }
        let devices = self.devices.get_or_init(|| {
            let opened = Devices::open(&self.names);
            opened.inspect_err(|error| tracing::warn!("no RDMA, transfers go over TCP: {error}")).ok()
        });
        let Some(Devices { fabric, staging, own }) = devices else { return Ok(None) };
        let handshakes = directory.handshakes(&descriptor.name).await.map_err(|error| error.to_string())?;
        let (staging, descriptor) = (Arc::clone(staging), Arc::clone(descriptor));
        let opened = Connection::open(fabric, staging, own, &handshakes, descriptor, limits).await;
        opened.map(Some).map_err(|error| error.to_string())
    }
}
