//! Transfers through mapped memory: announced over a connection, copied by the client.

use crc_fast::{CrcAlgorithm, Digest};

use super::SharedMapping;
use crate::dial::TransferConnection;
use crate::error::TransferError;
use crate::plane::{
    self, NO_CHECKSUM, STATUS, TransferHeader, TransferOperation, TransferProtocol, TransferStatus,
};

/// Bytes copied at a time, small enough that they are still in the core's cache when their checksum is computed.
const CHUNK: usize = 256 << 10;
/// Chunks after which other tasks of the thread run.
const CHUNKS_PER_TURN: usize = 8;

impl TransferConnection {
    /// As [`TransferConnection::read_ranges`], through mapped memory of the connection's node.
    ///
    /// # Errors
    /// [`TransferError`]; `Rejected` also if the mapping is not of the node's present memory.
    pub async fn read_mapped(
        &mut self,
        mapping: &SharedMapping,
        start: u64,
        into: &mut [&mut [u8]],
        mut observer: impl FnMut(&[u8]),
    ) -> Result<(), TransferError> {
        let size = into.iter().map(|range| range.len() as u64).sum();
        self.send_mapped_header(mapping, start, size, TransferOperation::Read).await?;
        self.status(start, size).await?;
        let mut trailer = [0; STATUS];
        self.fill(&mut trailer).await?;
        let recorded = plane::checksum(trailer);
        mapping.populate(start, size);
        let mut crc = Digest::new(CrcAlgorithm::Crc32Iscsi);
        let (mut position, mut copied) = (start, 0);
        for chunk in into.iter_mut().flat_map(|range| range.chunks_mut(CHUNK)) {
            mapping.read(position, chunk).map_err(|error| self.failed(error))?;
            if recorded.is_some() {
                crc.update(chunk);
            }
            observer(chunk);
            position = position.saturating_add(chunk.len() as u64);
            yield_between_turns(&mut copied).await;
        }
        // It fills the lower half.
        if recorded.is_some_and(|recorded| recorded != crc.finalize() as u32) {
            return Err(self.damaged(start, size));
        }
        Ok(())
    }

    /// As [`TransferConnection::write_ranges`], through mapped memory of the connection's node.
    ///
    /// # Errors
    /// As [`TransferConnection::read_mapped`].
    pub async fn write_mapped(
        &mut self,
        mapping: &SharedMapping,
        start: u64,
        from: &[&[u8]],
    ) -> Result<(), TransferError> {
        let size = from.iter().map(|range| range.len() as u64).sum();
        self.send_mapped_header(mapping, start, size, TransferOperation::Write).await?;
        let has_receipt = match self.receive_status(start, size).await? {
            TransferStatus::Ok => true,
            TransferStatus::OkWithoutReceipt => false,
            other => return Err(self.unexpected(other)),
        };
        mapping.populate(start, size);
        let mut crc = Digest::new(CrcAlgorithm::Crc32Iscsi);
        let (mut position, mut copied) = (start, 0);
        for chunk in from.iter().flat_map(|range| range.chunks(CHUNK)) {
            mapping.write(position, chunk).map_err(|error| self.failed(error))?;
            if has_receipt {
                crc.update(chunk);
            }
            position = position.saturating_add(chunk.len() as u64);
            yield_between_turns(&mut copied).await;
        }
        if !has_receipt {
            return self.send_bytes(&NO_CHECKSUM).await;
        }
        self.send_bytes(&plane::trailer(crc.finalize() as u32)).await?;
        self.status(start, size).await
    }

    async fn send_mapped_header(
        &mut self,
        mapping: &SharedMapping,
        address: u64,
        size: u64,
        operation: TransferOperation,
    ) -> Result<(), TransferError> {
        let protocol = TransferProtocol::Mapped(mapping.id);
        self.send_bytes(&TransferHeader { size, address, operation, protocol }.encode()).await
    }
}

/// A copy never waits, so that a large one would keep the thread from other transfers.
async fn yield_between_turns(copied: &mut usize) {
    *copied += 1;
    if copied.is_multiple_of(CHUNKS_PER_TURN) {
        tokio::task::yield_now().await;
    }
}
