//! The transfer of one slice of an object over one connection.

use mooncake_wire::capability::AccessRights;
use moongate_transfer::{SharedMapping, TransferConnection, TransferError, TransferProtocol};

use crate::checksum::RunningChecksum;

/// A transfer of one slice, which may be in several ranges of memory: a read or a write.
pub(crate) enum SliceTransfer<'a, 'b> {
    Read {
        into: &'a mut [&'b mut [u8]],
        sum: &'a mut RunningChecksum,
        /// Whether the caller waits only for this transfer.
        may_busy_poll: bool,
    },
    Write {
        from: &'a [&'b [u8]],
        /// As for a read. Used only if the node has no body to receive, so that it responds at once.
        may_busy_poll: bool,
    },
}

impl SliceTransfer<'_, '_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Read { into, .. } => into.iter().map(|range| range.len()).sum(),
            Self::Write { from, .. } => from.iter().map(|range| range.len()).sum(),
        }
    }

    pub(crate) fn rights(&self) -> AccessRights {
        match self {
            Self::Read { .. } => AccessRights::Read,
            Self::Write { .. } => AccessRights::Write,
        }
    }

    /// Runs it over a connection, or through `mapping`, which has the whole range, and a connection to its node.
    pub(crate) async fn run(
        &mut self,
        connection: &mut PooledConnection,
        mapping: Option<&SharedMapping>,
        address: u64,
    ) -> Result<(), TransferError> {
        if let (PooledConnection::Tcp(connection), Some(mapping)) = (&mut *connection, mapping) {
            return self.run_mapped(connection, mapping, address).await;
        }
        match self {
            Self::Read { into, sum, may_busy_poll } => {
                connection.read(address, into, sum, *may_busy_poll).await
            }
            Self::Write { from, .. } => connection.write(address, from).await,
        }
    }

    async fn run_mapped(
        &mut self,
        connection: &mut TransferConnection,
        mapping: &SharedMapping,
        address: u64,
    ) -> Result<(), TransferError> {
        match self {
            Self::Read { into, sum, may_busy_poll } => {
                sum.restart();
                connection.set_busy_poll(*may_busy_poll);
                connection.read_mapped(mapping, address, into, |bytes| sum.add(bytes)).await
            }
            Self::Write { from, may_busy_poll } => {
                connection.set_busy_poll(*may_busy_poll);
                connection.write_mapped(mapping, address, from).await
            }
        }
    }
}

/// A connection to a node, idle or in use.
#[derive(Debug)]
pub(crate) enum PooledConnection {
    Tcp(TransferConnection),
    Rdma(moongate_rdma::RdmaConnection),
}

impl PooledConnection {
    async fn read(
        &mut self,
        address: u64,
        into: &mut [&mut [u8]],
        sum: &mut RunningChecksum,
        may_busy_poll: bool,
    ) -> Result<(), TransferError> {
        sum.restart();
        match self {
            Self::Tcp(connection) => {
                connection.set_busy_poll(may_busy_poll);
                connection.read_ranges(address, into, |bytes| sum.add(bytes)).await
            }
            Self::Rdma(connection) => {
                let mut start = address;
                for range in into {
                    connection.read(start, range).await?;
                    sum.add(range);
                    start = start.saturating_add(range.len() as u64);
                }
                Ok(())
            }
        }
    }

    /// Writes, and returns after the node has applied the write.
    async fn write(&mut self, address: u64, from: &[&[u8]]) -> Result<(), TransferError> {
        let connection = match self {
            Self::Tcp(connection) => connection,
            Self::Rdma(connection) => {
                let mut start = address;
                for range in from {
                    connection.write(start, range).await?;
                    start = start.saturating_add(range.len() as u64);
                }
                return Ok(());
            }
        };
        connection.set_busy_poll(false);
        connection.write_ranges(address, from).await?;
        let last = from.iter().rev().find_map(|range| range.last());
        let (TransferProtocol::V1, Some(last)) = (connection.protocol(), last) else { return Ok(()) };
        // V1 has no write acknowledgement. It processes requests in order, so a read of the last byte confirms the write.
        let (mut end, size) = ([0], from.iter().map(|range| range.len() as u64).sum::<u64>());
        connection.read(address.saturating_add(size - 1), &mut end).await?;
        if end == [*last] {
            return Ok(());
        }
        Err(TransferError::Checksum { address: connection.address().to_owned(), start: address, size })
    }

    /// Whether the certificate was renewed since the connection was opened. The node would refuse capabilities for the new one.
    pub(crate) fn is_of_old_certificate(&self) -> bool {
        matches!(self, Self::Tcp(connection) if connection.is_of_old_certificate())
    }

    /// Whether a new connection may succeed where this one failed.
    pub(crate) fn is_outdated(&self, error: &TransferError) -> bool {
        match (self, error) {
            (_, TransferError::Broken { .. }) => true,
            // An RDMA connection has the node's memory regions of the time when it was opened.
            (Self::Rdma(_), TransferError::Rejected { .. }) => true,
            _ => false,
        }
    }
}
