//! Calls to a node with a disk tier.

use mooncake_wire::disk::{DiskRequest, ReleaseArguments, StageArguments, decode_staged, name};

use super::error::{RpcError, RpcProtocolError};
use super::master::MasterClient;

/// Client of a node that stages objects from its disk in memory, from where they are read like others. Clones are cheap.
#[derive(Clone, Debug)]
pub struct DiskNodeClient {
    client: MasterClient,
}

/// An object that a node has staged in its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedObject {
    /// Identifies the staged object when it is released.
    pub batch_id: u64,
    /// Transfer endpoint of the node.
    pub endpoint: String,
    /// Address of the object in the node's memory.
    pub address: u64,
    /// How long the object stays there, in milliseconds.
    pub ttl_ms: u64,
}

impl DiskNodeClient {
    /// The node to which `client` connects: at the `host:port` in disk replicas.
    #[must_use]
    pub fn new(client: MasterClient) -> Self {
        Self { client }
    }

    /// Stages an object of `size` bytes. It expires after the returned time, and should be released when it was read.
    ///
    /// # Errors
    /// [`RpcError::Refused`] if the node lacks the object, or its staging buffer is full.
    pub async fn stage(&self, tenant: &str, key: &str, size: u64) -> Result<StagedObject, RpcError> {
        let name = name(tenant, key);
        let sizes = vec![i64::try_from(size).unwrap_or(i64::MAX)];
        let request = DiskRequest::Stage(StageArguments { names: vec![name.as_str()], sizes });
        let staged =
            self.client.request(|sequence, out| request.encode(sequence, out), decode_staged).await?;
        match staged.addresses[..] {
            [address] => Ok(StagedObject {
                batch_id: staged.batch_id,
                endpoint: staged.endpoint,
                address,
                ttl_ms: staged.ttl_ms,
            }),
            _ => Err(self.client.protocol_error(RpcProtocolError::StagedCount(staged.addresses.len()))),
        }
    }

    /// Releases the memory of staged objects.
    ///
    /// # Errors
    /// When the node does not respond. The staged objects expire by themselves.
    pub async fn release(&self, batch_id: u64) -> Result<(), RpcError> {
        let request = DiskRequest::Release(ReleaseArguments { batch_id });
        self.client.exchange_request(|sequence, out| request.encode(sequence, out)).await.map(drop)
    }
}
