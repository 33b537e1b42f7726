//! Connections to other nodes, used by copy, move and promotion tasks.

use std::sync::Arc;

use mooncake_wire::capability::AccessRights;
use moongate_master_client::rpc::{GrantTable, StoreCredentials};
use moongate_transfer::descriptor::NoTcpError;
use moongate_transfer::{
    DescriptorDirectory, DirectoryError, TransferConnection, TransferError, TransferLimits, TransferProtocol,
};

/// Why no connection to another node could be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerConnectError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    NoTcp(#[from] NoTcpError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

/// A connection to another node's data port, with capabilities if peers are authenticated.
pub(crate) struct PeerConnection {
    connection: TransferConnection,
    endpoint: String,
    grants: Option<Arc<GrantTable>>,
}

impl PeerConnection {
    /// Looks up the node by its name `endpoint`, and connects to its data port.
    pub(crate) async fn open(
        directory: &DescriptorDirectory,
        endpoint: &str,
        authentication: Option<&StoreCredentials>,
    ) -> Result<Self, PeerConnectError> {
        let descriptor = directory.descriptor(endpoint).await?;
        let (host, port) = descriptor.data_address(endpoint)?;
        let limits = TransferLimits::default();
        let connection = match authentication {
            None => TransferConnection::open(&host, port, descriptor.protocol(), limits).await?,
            Some(it) => TransferConnection::open_secured(&host, port, limits, &it.tls).await?,
        };
        let grants = authentication.map(|it| Arc::clone(&it.grants));
        Ok(Self { connection, endpoint: endpoint.to_owned(), grants })
    }

    pub(crate) fn protocol(&self) -> TransferProtocol {
        self.connection.protocol()
    }

    pub(crate) async fn read(&mut self, start: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.attach_capability(AccessRights::Read, start, into.len());
        self.connection.read(start, into).await
    }

    pub(crate) async fn write(&mut self, start: u64, from: &[u8]) -> Result<(), TransferError> {
        self.attach_capability(AccessRights::Write, start, from.len());
        self.connection.write(start, from).await
    }

    fn attach_capability(&mut self, rights: AccessRights, start: u64, size: usize) {
        if let Some(grants) = &self.grants {
            self.connection.set_capability(grants.find(&self.endpoint, rights, start, size as u64));
        }
    }
}
