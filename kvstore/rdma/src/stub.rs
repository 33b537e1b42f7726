//! Types that replace the RDMA devices in a build without `verbs`. No device can be opened, so no other method is ever called. Callers
//! compile unchanged with and without the feature.

use std::sync::Arc;

use moongate_memory::MappedRegion;
use moongate_transfer::{SegmentBuffer, SegmentDescriptor, TransferError, TransferLimits};

use crate::error::{RdmaConnectError, RdmaSetupError};

/// The opened RDMA devices of a process.
#[derive(Debug)]
pub enum RdmaFabric {}

/// Memory that is registered with all devices of the process.
#[derive(Debug)]
pub enum RegisteredMemory {}

/// Registered memory for a client's transfers.
#[derive(Debug)]
pub enum RdmaStaging {}

/// Accepts RDMA connections of peers.
#[derive(Debug)]
pub struct RdmaAcceptor(Arc<RdmaFabric>);

/// Reads and writes a node's memory.
#[derive(Debug)]
pub enum RdmaConnection {}

impl RdmaFabric {
    /// Always fails: no device can be opened.
    ///
    /// # Errors
    /// [`RdmaSetupError::NotBuilt`].
    pub fn open(_: &[String]) -> Result<Self, RdmaSetupError> {
        Err(RdmaSetupError::NotBuilt)
    }

    /// Registers memory with all devices.
    ///
    /// # Errors
    /// Never.
    pub fn register(&self, _: &Arc<MappedRegion>) -> Result<RegisteredMemory, RdmaSetupError> {
        match *self {}
    }

    /// Adds the RDMA devices to a descriptor.
    pub fn describe(&self, _: &mut SegmentDescriptor) {
        match *self {}
    }
}

impl RegisteredMemory {
    /// Sets the memory location and the keys in a descriptor's buffer.
    pub fn describe(&self, _: &mut SegmentBuffer) {
        match *self {}
    }
}

impl RdmaStaging {
    /// Allocates and registers staging chunks.
    ///
    /// # Errors
    /// Never.
    pub fn new(fabric: &RdmaFabric, _: u32) -> Result<Self, RdmaSetupError> {
        match *fabric {}
    }
}

impl RdmaAcceptor {
    /// Creates the acceptor of the node with this name.
    #[must_use]
    pub fn new(fabric: Arc<RdmaFabric>, _: String) -> Self {
        Self(fabric)
    }

    /// Responds to a handshake; both messages are JSON.
    #[must_use]
    pub fn respond(&self, _: &[u8]) -> Vec<u8> {
        match *self.0 {}
    }
}

impl RdmaConnection {
    /// Connects all local devices to the node's.
    ///
    /// # Errors
    /// Never.
    #[expect(clippy::unused_async, reason = "same signature as with the feature `verbs`")]
    pub async fn open(
        fabric: &RdmaFabric,
        _: Arc<RdmaStaging>,
        _: &str,
        _: &str,
        _: Arc<SegmentDescriptor>,
        _: TransferLimits,
    ) -> Result<Self, RdmaConnectError> {
        match *fabric {}
    }

    /// Reads the node's memory from an address on.
    ///
    /// # Errors
    /// Never.
    #[expect(clippy::unused_async, reason = "same signature as with the feature `verbs`")]
    pub async fn read(&self, _: u64, _: &mut [u8]) -> Result<(), TransferError> {
        match *self {}
    }

    /// Writes the node's memory from an address on.
    ///
    /// # Errors
    /// Never.
    #[expect(clippy::unused_async, reason = "same signature as with the feature `verbs`")]
    pub async fn write(&self, _: u64, _: &[u8]) -> Result<(), TransferError> {
        match *self {}
    }
}
