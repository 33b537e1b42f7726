//! What takes the place of devices in a program that was built without `verbs`: none can ever be opened, so that nothing
//! here ever runs. Whoever uses this crate is the same program either way.

use std::sync::Arc;

use moongate_memory::Region;
use moongate_transfer::{Buffer, Limits, SegmentDescriptor, TransferError};

use crate::error::NoRdma;

/// Devices at work.
#[derive(Debug)]
pub enum Fabric {}

/// Memory that is registered with devices.
#[derive(Debug)]
pub enum Lent {}

/// Registered memory for a client's transfers.
#[derive(Debug)]
pub enum Staging {}

/// Answers peers that want to connect.
#[derive(Debug)]
pub struct Acceptor(Arc<Fabric>);

/// Reads and writes a node's memory.
#[derive(Debug)]
pub enum Connection {}

impl Fabric {
    /// Opens no device.
    ///
    /// # Errors
    /// [`NoRdma::NotBuilt`].
    pub fn open(_: &[String]) -> Result<Self, NoRdma> {
        Err(NoRdma::NotBuilt)
    }

    /// Lends memory to peers.
    ///
    /// # Errors
    /// Never.
    pub fn lend(&self, _: &Arc<Region>) -> Result<Lent, NoRdma> {
        match *self {}
    }

    /// Says in a descriptor that the node has RDMA.
    pub fn describe(&self, _: &mut SegmentDescriptor) {
        match *self {}
    }
}

impl Lent {
    /// Says in a descriptor's buffer where in memory it lies, and its keys.
    pub fn describe(&self, _: &mut Buffer) {
        match *self {}
    }
}

impl Staging {
    /// So many pieces.
    ///
    /// # Errors
    /// Never.
    pub fn new(fabric: &Fabric, _: u32) -> Result<Self, NoRdma> {
        match *fabric {}
    }
}

impl Acceptor {
    /// For the node of this name.
    #[must_use]
    pub fn new(fabric: Arc<Fabric>, _: String) -> Self {
        Self(fabric)
    }

    /// Answers a question, both as JSON.
    #[must_use]
    pub fn answer(&self, _: &[u8]) -> Vec<u8> {
        match *self.0 {}
    }
}

impl Connection {
    /// Connects to a node.
    ///
    /// # Errors
    /// Never.
    #[expect(clippy::unused_async, reason = "as with devices")]
    pub async fn open(
        fabric: &Fabric,
        _: Arc<Staging>,
        _: &str,
        _: &str,
        _: Arc<SegmentDescriptor>,
        _: Limits,
    ) -> Result<Self, TransferError> {
        match *fabric {}
    }

    /// Reads the node's memory.
    ///
    /// # Errors
    /// Never.
    #[expect(clippy::unused_async, reason = "as with devices")]
    pub async fn read(&self, _: u64, _: &mut [u8]) -> Result<(), TransferError> {
        match *self {}
    }

    /// Writes the node's memory.
    ///
    /// # Errors
    /// Never.
    #[expect(clippy::unused_async, reason = "as with devices")]
    pub async fn write(&self, _: u64, _: &[u8]) -> Result<(), TransferError> {
        match *self {}
    }
}
