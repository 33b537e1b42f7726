//! Connections to other nodes, for copies.

use std::sync::Arc;

use mooncake_wire::capability::Rights;
use moongate_kvstore::rpc::{Authentication, GrantTable};
use moongate_transfer::{Connection, Directory, Limits, Protocol, TransferError};

use crate::tasks::TaskError;

/// A connection to another node.
pub(crate) struct PeerConnection {
    connection: Connection,
    endpoint: String,
    grants: Option<Arc<GrantTable>>,
}

impl PeerConnection {
    /// Connects to the data port of the node that is called `endpoint`.
    pub(crate) async fn open(
        directory: &Directory,
        endpoint: &str,
        authentication: Option<&Authentication>,
    ) -> Result<Self, TaskError> {
        let descriptor = directory.descriptor(endpoint).await?;
        let (host, port) = descriptor.data_address(endpoint)?;
        let limits = Limits::default();
        let connection = match authentication {
            None => Connection::open(&host, port, descriptor.protocol(), limits).await?,
            Some(it) => Connection::open_secured(&host, port, limits, &it.tls).await?,
        };
        let grants = authentication.map(|it| Arc::clone(&it.grants));
        Ok(Self { connection, endpoint: endpoint.to_owned(), grants })
    }

    pub(crate) fn protocol(&self) -> Protocol {
        self.connection.protocol()
    }

    pub(crate) async fn read(&mut self, start: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.present(Rights::Read, start, into.len());
        self.connection.read(start, into).await
    }

    pub(crate) async fn write(&mut self, start: u64, from: &[u8]) -> Result<(), TransferError> {
        self.present(Rights::Write, start, from.len());
        self.connection.write(start, from).await
    }

    fn present(&mut self, rights: Rights, start: u64, size: usize) {
        if let Some(grants) = &self.grants {
            self.connection.present(grants.find(&self.endpoint, rights, start, size as u64));
        }
    }
}
