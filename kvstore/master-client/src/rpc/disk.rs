//! Calls to a node with a disk, for what is only there.

use mooncake_wire::disk::{
    DiskRequest, ReleaseArguments, StageArguments, StagedObjects, decode_staged, name,
};
use moongate_runtime::Supervisor;

use super::error::RpcError;
use super::grants::StoreCredentials;
use super::master::{MasterClient, MasterClientOptions};

/// A node that brings objects from its disk into its memory, where they are read like others. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct DiskNodeClient {
    client: MasterClient,
}

impl DiskNodeClient {
    /// The node whose replicas on disk name this `host:port`. Connects when it is called first.
    #[must_use]
    pub fn new(address: &str, options: MasterClientOptions, supervisor: &Supervisor) -> Self {
        Self::authenticated(address, options, None, supervisor)
    }

    /// The same over TLS with certificates, if `authentication` is given.
    #[must_use]
    pub fn authenticated(
        address: &str,
        options: MasterClientOptions,
        authentication: Option<StoreCredentials>,
        supervisor: &Supervisor,
    ) -> Self {
        Self { client: MasterClient::authenticated(address, options, authentication, supervisor) }
    }

    /// Has an object of `size` bytes brought into memory. It stays there for a while, and should be released before.
    ///
    /// # Errors
    /// [`RpcError::Refused`] if the node has no such object, or no room for it just now.
    pub async fn stage(&self, tenant: &str, key: &str, size: u64) -> Result<StagedObjects<String>, RpcError> {
        let name = name(tenant, key);
        let sizes = vec![i64::try_from(size).unwrap_or(i64::MAX)];
        let request = DiskRequest::Stage(StageArguments { names: vec![name.as_str()], sizes });
        let body = self.client.send_request(|sequence, out| request.encode(sequence, out)).await?;
        let staged = decode_staged(&body).map_err(|error| self.client.protocol_error(error))??;
        if staged.addresses.len() == 1 {
            return Ok(staged);
        }
        Err(self
            .client
            .protocol_error(format!("it brought {} objects when asked for one", staged.addresses.len())))
    }

    /// Gives back the memory of what was read.
    ///
    /// # Errors
    /// When there is no answer. The node takes it back after a while.
    pub async fn release(&self, batch_id: u64) -> Result<(), RpcError> {
        let request = DiskRequest::Release(ReleaseArguments { batch_id });
        self.client.send_request(|sequence, out| request.encode(sequence, out)).await.map(drop)
    }
}
