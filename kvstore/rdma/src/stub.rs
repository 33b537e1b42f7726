//! What takes the place of devices in a program that was built without `verbs`: none can ever be opened, so that nothing
//! here ever runs. Whoever uses this crate is the same program either way.

use std::sync::Arc;

use moongate_memory::MappedRegion;
use moongate_transfer::{SegmentBuffer, SegmentDescriptor, TransferError, TransferLimits};

use crate::error::RdmaSetupError;

/// Devices at work.
#[derive(Debug)]
pub enum RdmaFabric {}

/// Memory that is registered with devices.
#[derive(Debug)]
pub enum RegisteredMemory {}

/// Registered memory for a client's transfers.
#[derive(Debug)]
pub enum RdmaStaging {}

/// Answers peers that want to connect.
#[derive(Debug)]
pub struct RdmaAcceptor(Arc<RdmaFabric>);

/// Reads and writes a node's memory.
#[derive(Debug)]
pub enum RdmaConnection {}

impl RdmaFabric {
    /// Opens no device.
    ///
    /// # Errors
    /// [`RdmaSetupError::NotBuilt`].
    pub fn open(_: &[String]) -> Result<Self, RdmaSetupError> {
        Err(RdmaSetupError::NotBuilt)
    }

    /// Lends memory to peers.
    ///
    /// # Errors
    /// Never.
    pub fn register(&self, _: &Arc<MappedRegion>) -> Result<RegisteredMemory, RdmaSetupError> {
        match *self {}
    }

    /// Says in a descriptor that the node has RDMA.
    pub fn describe(&self, _: &mut SegmentDescriptor) {
        match *self {}
    }
}

impl RegisteredMemory {
    /// Says in a descriptor's buffer where in memory it lies, and its keys.
    pub fn describe(&self, _: &mut SegmentBuffer) {
        match *self {}
    }
}

impl RdmaStaging {
    /// So many pieces.
    ///
    /// # Errors
    /// Never.
    pub fn new(fabric: &RdmaFabric, _: u32) -> Result<Self, RdmaSetupError> {
        match *fabric {}
    }
}

impl RdmaAcceptor {
    /// For the node of this name.
    #[must_use]
    pub fn new(fabric: Arc<RdmaFabric>, _: String) -> Self {
        Self(fabric)
    }

    /// Answers a question, both as JSON.
    #[must_use]
    pub fn respond(&self, _: &[u8]) -> Vec<u8> {
        match *self.0 {}
    }
}

impl RdmaConnection {
    /// Connects to a node.
    ///
    /// # Errors
    /// Never.
    #[expect(clippy::unused_async, reason = "as with devices")]
    pub async fn open(
        fabric: &RdmaFabric,
        _: Arc<RdmaStaging>,
        _: &str,
        _: &str,
        _: Arc<SegmentDescriptor>,
        _: TransferLimits,
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
