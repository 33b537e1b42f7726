//! RDMA client: reads and writes another node's memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::try_join_all;
use moongate_transfer::handshake::{self, HandshakeKind};
use moongate_transfer::{DeviceDescriptor, SegmentBuffer, SegmentDescriptor, TransferError, TransferLimits};

use crate::connection::{HandshakeMessage, NicPath};
use crate::error::{RdmaConnectError, RdmaLinkSetupError};
use crate::fabric::RdmaFabric;
use crate::link::{LocalMemory, RdmaLink, RdmaLinkError, RdmaOperation, RemoteMemory};
use crate::nic::Nic;
use crate::staging::{RdmaStaging, STAGING_CHUNK};
use crate::topology;

/// Distinguishes the connections of this process: a peer treats a second handshake from the same device path as a restart of the first.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// A connection to a node, with one link per local device.
#[derive(Debug)]
pub struct RdmaConnection {
    staging: Arc<RdmaStaging>,
    descriptor: Arc<SegmentDescriptor>,
    rails: Vec<RdmaRail>,
    limit: Duration,
}

/// A link between a local device and one of the node's.
#[derive(Debug)]
struct RdmaRail {
    /// Index in the fabric's device list.
    local_nic: usize,
    /// Index in the descriptor's device list.
    remote_device: usize,
    link: RdmaLink,
}

impl RdmaConnection {
    /// Connects all local devices to the node's. `handshakes` is the address of the node's handshake port, `own` the name of this process
    /// or node.
    ///
    /// # Errors
    /// When the node has no RDMA device, does not respond, or rejects the connection.
    pub async fn open(
        fabric: &RdmaFabric,
        staging: Arc<RdmaStaging>,
        own: &str,
        handshakes: &str,
        descriptor: Arc<SegmentDescriptor>,
        limits: TransferLimits,
    ) -> Result<Self, RdmaConnectError> {
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let mut rails = Vec::new();
        for (index, nic) in fabric.nics().iter().enumerate() {
            let remote_device = peer_device(&descriptor, index).ok_or_else(|| RdmaConnectError {
                address: descriptor.name.clone(),
                source: RdmaLinkSetupError::NoDevice,
            })?;
            let own_path = NicPath { node: format!("{own}.{number}"), device: nic.device().name.clone() };
            let link =
                connect(nic, &own_path, handshakes, &descriptor, remote_device, limits.connect).await?;
            rails.push(RdmaRail { local_nic: index, remote_device, link });
        }
        Ok(Self { staging, descriptor, rails, limit: limits.stall })
    }

    /// Reads the node's memory from `start` on. On failure `into` may be partly overwritten.
    ///
    /// # Errors
    /// [`TransferError`].
    pub async fn read(&self, start: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let buffer = self.buffer(start, into.len())?;
        // With RDMA a chunk length always fits a `usize`.
        let chunks = into.chunks_mut(STAGING_CHUNK as usize).enumerate().map(async |(number, bytes)| {
            let chunk = Arc::new(self.staging.acquire_chunk().await);
            let target = start + number as u64 * STAGING_CHUNK;
            let len = bytes.len() as u64;
            self.transfer(RdmaOperation::Read, buffer, number, target, chunk.offset(), len, chunk.clone())
                .await?;
            // The chunk lies within the staging region.
            self.staging.region().read_at(chunk.offset(), bytes).map_err(|_| self.rejected(target, len))
        });
        try_join_all(chunks).await.map(drop)
    }

    /// Writes the node's memory from `start` on; returns when the write is complete.
    ///
    /// # Errors
    /// [`TransferError`].
    pub async fn write(&self, start: u64, from: &[u8]) -> Result<(), TransferError> {
        let buffer = self.buffer(start, from.len())?;
        let chunks = from.chunks(STAGING_CHUNK as usize).enumerate().map(async |(number, bytes)| {
            let chunk = Arc::new(self.staging.acquire_chunk().await);
            let target = start + number as u64 * STAGING_CHUNK;
            let len = bytes.len() as u64;
            self.staging.region().write_at(chunk.offset(), bytes).map_err(|_| self.rejected(target, len))?;
            self.transfer(RdmaOperation::Write, buffer, number, target, chunk.offset(), len, chunk.clone())
                .await
        });
        try_join_all(chunks).await.map(drop)
    }

    #[expect(clippy::too_many_arguments, reason = "both sides of a transfer")]
    async fn transfer(
        &self,
        operation: RdmaOperation,
        buffer: &SegmentBuffer,
        number: usize,
        address: u64,
        offset: u64,
        len: u64,
        guard: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<(), TransferError> {
        let rail = number.checked_rem(self.rails.len()).and_then(|index| self.rails.get(index));
        let endpoints = rail.and_then(|rail| {
            Some((
                rail,
                *buffer.rkey.get(rail.remote_device)?,
                self.staging.registration().registered.get(rail.local_nic)?,
            ))
        });
        let (rail, key, memory) = endpoints.ok_or_else(|| self.rejected(address, len))?;
        let local = LocalMemory { memory, offset, len };
        let target = RemoteMemory { address, key };
        rail.link.transfer(operation, local, target, guard, self.limit).await.map_err(|error| match error {
            RdmaLinkError::Failed { peer: address, source } => {
                TransferError::Broken { address, source: io::Error::other(source).into() }
            }
            RdmaLinkError::TimedOut { peer: address, limit } => TransferError::TimedOut { address, limit },
        })
    }

    /// The buffer that contains the whole range.
    fn buffer(&self, start: u64, size: usize) -> Result<&SegmentBuffer, TransferError> {
        let size = size as u64;
        let contains = |buffer: &&SegmentBuffer| {
            let offset = start.checked_sub(buffer.addr);
            offset.and_then(|offset| offset.checked_add(size)).is_some_and(|end| end <= buffer.length)
        };
        self.descriptor.buffers.iter().find(contains).ok_or_else(|| self.rejected(start, size))
    }

    fn rejected(&self, start: u64, size: u64) -> TransferError {
        TransferError::Rejected { address: self.descriptor.name.clone(), start, size }
    }
}

/// Index of the node's device for local device number `index`.
fn peer_device(descriptor: &SegmentDescriptor, index: usize) -> Option<usize> {
    let location = descriptor.buffers.first().map_or(topology::ANY_LOCATION, |buffer| buffer.name.as_str());
    let preferred = topology::choose(&descriptor.priority_matrix, location, index, 0);
    let position =
        preferred.and_then(|name| descriptor.devices.iter().position(|device| device.name == name));
    position.or_else(|| index.checked_rem(descriptor.devices.len()))
}

async fn connect(
    nic: &Arc<Nic>,
    own: &NicPath,
    handshakes: &str,
    descriptor: &SegmentDescriptor,
    remote_device: usize,
    limit: Duration,
) -> Result<RdmaLink, RdmaConnectError> {
    let node = match descriptor.rdma_server_name.as_str() {
        "" => &descriptor.name,
        other => other,
    };
    let device = descriptor.devices.get(remote_device);
    let peer = format!("{node}@{}", device.map_or("", |device| device.name.as_str()));
    let link = set_up_link(nic, own, handshakes, &peer, device, limit).await;
    link.map_err(|source| RdmaConnectError { address: peer, source })
}

async fn set_up_link(
    nic: &Arc<Nic>,
    own: &NicPath,
    handshakes: &str,
    peer: &str,
    device: Option<&DeviceDescriptor>,
    limit: Duration,
) -> Result<RdmaLink, RdmaLinkSetupError> {
    let link = RdmaLink::new(nic, peer.to_owned()).map_err(RdmaLinkSetupError::QueuePairs)?;
    let request = HandshakeMessage {
        local_nic_path: own.to_string(),
        local_lid: nic.device().lid,
        local_gid: nic.device().gid.gid.to_string(),
        peer_nic_path: peer.to_owned(),
        qp_num: link.numbers(),
        reply_msg: String::new(),
    };
    let json = request.write();
    let exchange = handshake::request(handshakes, HandshakeKind::Connection, &json);
    let response = tokio::time::timeout(limit, exchange)
        .await
        .map_err(|_| RdmaLinkSetupError::TimedOut(limit))?
        .map_err(RdmaLinkSetupError::Handshake)?;
    let response = HandshakeMessage::read(&response)?;
    response.check_response(&request)?;
    link.connect(&response.remote(device)?).map_err(RdmaLinkSetupError::QueuePairs)?;
    Ok(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_paired_by_the_priority_matrix() {
        let device = |name: &str| DeviceDescriptor { name: name.to_owned(), ..Default::default() };
        let mut descriptor = SegmentDescriptor {
            devices: ["a", "b", "c"].map(device).to_vec(),
            buffers: vec![SegmentBuffer { name: "cpu:1".to_owned(), ..Default::default() }],
            ..Default::default()
        };
        assert_eq!([0, 1, 4].map(|index| peer_device(&descriptor, index)), [Some(0), Some(1), Some(1)]);
        let row = [vec!["c".to_owned(), "b".to_owned()], vec!["a".to_owned()]];
        descriptor.priority_matrix.insert("cpu:1".to_owned(), row);
        assert_eq!([0, 1, 2].map(|index| peer_device(&descriptor, index)), [Some(2), Some(1), Some(2)]);
        descriptor.devices.clear();
        assert_eq!(peer_device(&descriptor, 0), None);
    }
}
