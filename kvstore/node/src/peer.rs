//! Connections to other nodes, used by copy, move and promotion tasks.

use std::collections::HashMap;
use std::sync::Arc;

use mooncake_wire::capability::AccessRights;
use moongate_master_client::rpc::{GrantTable, StoreCredentials};
use moongate_transfer::descriptor::NoTcpError;
use moongate_transfer::{
    DescriptorDirectory, DirectoryError, TransferConnection, TransferError, TransferLimits, TransferProtocol,
};
use parking_lot::Mutex;

/// Maximum number of idle connections per node.
const MAX_IDLE: usize = 32;

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
#[derive(Debug)]
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

/// Idle connections to other nodes, by node: tasks for small objects would otherwise take longer to connect than to copy.
#[derive(Debug, Default)]
pub(crate) struct IdlePeers(Mutex<HashMap<String, Vec<PeerConnection>>>);

impl IdlePeers {
    pub(crate) fn take(&self, endpoint: &str) -> Option<PeerConnection> {
        let mut idle = self.0.lock();
        let connections = idle.get_mut(endpoint)?;
        let connection = connections.pop();
        if connections.is_empty() {
            idle.remove(endpoint);
        }
        connection
    }

    /// Keeps a connection on which all requests have succeeded.
    pub(crate) fn put(&self, connection: PeerConnection) {
        let mut idle = self.0.lock();
        let connections = idle.entry(connection.endpoint.clone()).or_default();
        if connections.len() < MAX_IDLE {
            connections.push(connection);
        }
    }

    /// Closes all connections.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}
