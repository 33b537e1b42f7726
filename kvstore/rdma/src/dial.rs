//! Reads and writes another node's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::try_join_all;
use moongate_transfer::handshake::{self, HandshakeKind};
use moongate_transfer::{SegmentBuffer, SegmentDescriptor, TransferError, TransferLimits};

use crate::connection::{HandshakeMessage, HandshakeMessageError, NicPath};
use crate::fabric::RdmaFabric;
use crate::link::{LocalMemory, RdmaLink, RdmaLinkError, RdmaOperation, RemoteMemory};
use crate::nic::Nic;
use crate::staging::{RdmaStaging, STAGING_CHUNK};
use crate::topology;

/// Tells apart the connections of this process: a peer takes two questions from the same device of the same node for
/// one that has been restarted.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// A connection to a node, over as many devices as this machine has.
#[derive(Debug)]
pub struct RdmaConnection {
    staging: Arc<RdmaStaging>,
    descriptor: Arc<SegmentDescriptor>,
    rails: Vec<RdmaRail>,
    limit: Duration,
}

/// A device of this machine with one of the node's.
#[derive(Debug)]
struct RdmaRail {
    /// Place in the list of this machine's devices.
    local_nic: usize,
    /// Place in the descriptor's.
    remote_device: usize,
    link: RdmaLink,
}

impl RdmaConnection {
    /// Connects all devices of this machine to the node's. `handshakes` is where the node answers them, `own` is the
    /// name of this process or node.
    ///
    /// # Errors
    /// [`TransferError::Connect`].
    pub async fn open(
        fabric: &RdmaFabric,
        staging: Arc<RdmaStaging>,
        own: &str,
        handshakes: &str,
        descriptor: Arc<SegmentDescriptor>,
        limits: TransferLimits,
    ) -> Result<Self, TransferError> {
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let mut rails = Vec::new();
        for (at, nic) in fabric.nics().iter().enumerate() {
            let peers = peers_device(&descriptor, at).ok_or_else(|| TransferError::Connect {
                address: descriptor.name.clone(),
                reason: "it tells of no RDMA device".to_owned(),
            })?;
            let own_path = NicPath { node: format!("{own}.{number}"), device: nic.device().name.clone() };
            let link = connect(nic, &own_path, handshakes, &descriptor, peers, limits.connect).await?;
            rails.push(RdmaRail { local_nic: at, remote_device: peers, link });
        }
        Ok(Self { staging, descriptor, rails, limit: limits.stall })
    }

    /// Reads the node's memory from `start` on. When it fails, `into` may have been written in part.
    ///
    /// # Errors
    /// [`TransferError`].
    pub async fn read(&self, start: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let buffer = self.buffer(start, into.len())?;
        // On every machine that has RDMA a piece's length is a `usize`.
        let pieces = into.chunks_mut(STAGING_CHUNK as usize).enumerate().map(async |(number, bytes)| {
            let piece = Arc::new(self.staging.acquire_chunk().await);
            let target = start + number as u64 * STAGING_CHUNK;
            let len = bytes.len() as u64;
            self.transfer(RdmaOperation::Read, buffer, number, target, piece.offset(), len, piece.clone())
                .await?;
            // A piece lies in the memory of all.
            self.staging.region().read_at(piece.offset(), bytes).map_err(|_| self.rejected(target, len))
        });
        try_join_all(pieces).await.map(drop)
    }

    /// Writes the node's memory from `start` on, and returns when it is written.
    ///
    /// # Errors
    /// [`TransferError`].
    pub async fn write(&self, start: u64, from: &[u8]) -> Result<(), TransferError> {
        let buffer = self.buffer(start, from.len())?;
        let pieces = from.chunks(STAGING_CHUNK as usize).enumerate().map(async |(number, bytes)| {
            let piece = Arc::new(self.staging.acquire_chunk().await);
            let target = start + number as u64 * STAGING_CHUNK;
            let len = bytes.len() as u64;
            self.staging.region().write_at(piece.offset(), bytes).map_err(|_| self.rejected(target, len))?;
            self.transfer(RdmaOperation::Write, buffer, number, target, piece.offset(), len, piece.clone())
                .await
        });
        try_join_all(pieces).await.map(drop)
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
        let rail = number.checked_rem(self.rails.len()).and_then(|at| self.rails.get(at));
        let ends = rail.and_then(|rail| {
            Some((
                rail,
                *buffer.rkey.get(rail.remote_device)?,
                self.staging.registration().registered.get(rail.local_nic)?,
            ))
        });
        let (rail, key, memory) = ends.ok_or_else(|| self.rejected(address, len))?;
        let local = LocalMemory { memory, offset, len };
        let target = RemoteMemory { address, key };
        rail.link.transfer(operation, local, target, guard, self.limit).await.map_err(|error| match error {
            RdmaLinkError::Failed { peer: address, reason } => TransferError::Broken { address, reason },
            RdmaLinkError::TimedOut { peer: address, limit } => TransferError::TimedOut { address, limit },
        })
    }

    /// The buffer in which all of these bytes lie.
    fn buffer(&self, start: u64, size: usize) -> Result<&SegmentBuffer, TransferError> {
        let size = size as u64;
        let holds = |buffer: &&SegmentBuffer| {
            let offset = start.checked_sub(buffer.addr);
            offset.and_then(|offset| offset.checked_add(size)).is_some_and(|end| end <= buffer.length)
        };
        self.descriptor.buffers.iter().find(holds).ok_or_else(|| self.rejected(start, size))
    }

    fn rejected(&self, start: u64, size: u64) -> TransferError {
        TransferError::Rejected { address: self.descriptor.name.clone(), start, size }
    }
}

/// The node's device for our device number `at`, as a place in the descriptor's list.
fn peers_device(descriptor: &SegmentDescriptor, at: usize) -> Option<usize> {
    let place = descriptor.buffers.first().map_or(topology::ANY_LOCATION, |buffer| buffer.name.as_str());
    let wanted = topology::choose(&descriptor.priority_matrix, place, at, 0);
    let named = wanted.and_then(|name| descriptor.devices.iter().position(|device| device.name == name));
    named.or_else(|| at.checked_rem(descriptor.devices.len()))
}

async fn connect(
    nic: &Arc<Nic>,
    own: &NicPath,
    handshakes: &str,
    descriptor: &SegmentDescriptor,
    peers: usize,
    limit: Duration,
) -> Result<RdmaLink, TransferError> {
    let node = match descriptor.rdma_server_name.as_str() {
        "" => &descriptor.name,
        other => other,
    };
    let device = descriptor.devices.get(peers);
    let peer = format!("{node}@{}", device.map_or("", |device| device.name.as_str()));
    let failed = |reason: String| TransferError::Connect { address: peer.clone(), reason };
    let link = RdmaLink::new(nic, peer.clone()).map_err(|error| failed(error.to_string()))?;
    let question = HandshakeMessage {
        local_nic_path: own.to_string(),
        local_lid: nic.device().lid,
        local_gid: nic.device().gid.gid.to_string(),
        peer_nic_path: peer.clone(),
        qp_num: link.numbers(),
        reply_msg: String::new(),
    };
    let json = question.write();
    let asked =
        tokio::time::timeout(limit, handshake::request(handshakes, HandshakeKind::Connection, &json)).await;
    let answer = asked.map_err(|_| failed(format!("nothing within {limit:?}")))?;
    let answer = answer.map_err(|error| failed(error.to_string()))?;
    let remote = HandshakeMessage::read(&answer).and_then(|answer| {
        answer.answers(&question)?;
        answer.remote(device)
    });
    let remote = remote.map_err(|error: HandshakeMessageError| failed(error.to_string()))?;
    link.connect(&remote).map_err(|error| failed(error.to_string()))?;
    Ok(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_paired_as_the_node_prefers() {
        let device =
            |name: &str| moongate_transfer::DeviceDescriptor { name: name.to_owned(), ..Default::default() };
        let mut descriptor = SegmentDescriptor {
            devices: ["a", "b", "c"].map(device).to_vec(),
            buffers: vec![SegmentBuffer { name: "cpu:1".to_owned(), ..Default::default() }],
            ..Default::default()
        };
        assert_eq!([0, 1, 4].map(|at| peers_device(&descriptor, at)), [Some(0), Some(1), Some(1)]);
        let row = [vec!["c".to_owned(), "b".to_owned()], vec!["a".to_owned()]];
        descriptor.priority_matrix.insert("cpu:1".to_owned(), row);
        assert_eq!([0, 1, 2].map(|at| peers_device(&descriptor, at)), [Some(2), Some(1), Some(2)]);
        descriptor.devices.clear();
        assert_eq!(peers_device(&descriptor, 0), None);
    }
}
