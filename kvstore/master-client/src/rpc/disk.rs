//! Calls to a node with a disk tier.

use mooncake_wire::disk::{
    DiskRequest, ReleaseArguments, StageArguments, StagedObjects, decode_staged, name,
};
use moongate_runtime::Supervisor;

use super::error::RpcError;
use super::grants::StoreCredentials;
use super::master::{MasterClient, MasterClientOptions};

/// Client of a node that stages objects from its disk in memory, from where they are read like others. Clones are cheap.
#[derive(Clone, Debug)]
pub struct DiskNodeClient {
    client: MasterClient,
}

impl DiskNodeClient {
    /// The node at the `host:port` in disk replicas. Connects on first use.
    #[must_use]
    pub fn new(address: &str, options: MasterClientOptions, supervisor: &Supervisor) -> Self {
        Self::authenticated(address, options, None, supervisor)
    }

    /// As [`DiskNodeClient::new`], over TLS with certificates if `authentication` is given.
    #[must_use]
    pub fn authenticated(
        address: &str,
        options: MasterClientOptions,
        authentication: Option<StoreCredentials>,
        supervisor: &Supervisor,
    ) -> Self {
        Self { client: MasterClient::authenticated(address, options, authentication, supervisor) }
    }

    /// Stages an object of `size` bytes. It expires after the returned time, and should be released when it was read.
    ///
    /// # Errors
    /// [`RpcError::Refused`] if the node lacks the object, or its staging buffer is full.
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
            .protocol_error(format!("it staged {} objects instead of one", staged.addresses.len())))
    }

    /// Releases the memory of staged objects.
    ///
    /// # Errors
    /// When the node does not respond. The staged objects expire by themselves.
    pub async fn release(&self, batch_id: u64) -> Result<(), RpcError> {
        let request = DiskRequest::Release(ReleaseArguments { batch_id });
        self.client.send_request(|sequence, out| request.encode(sequence, out)).await.map(drop)
    }
}
