//! Promotes objects from disk to memory.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::disk::name;
use mooncake_wire::rpc::{
    ClientArguments, ClientKeyArguments, NotifyPromotionFailure, NotifyPromotionSuccess, PromotionAllocStart,
    PromotionArguments, PromotionObjectHeartbeat,
};
use mooncake_wire::types::{BufferDescriptor, OffloadTask, ReplicaDescriptor};
use moongate_master_client::rpc::RpcError;
use moongate_tier::FileTier;
use moongate_transfer::TransferProtocol;
use moongate_transfer::serve::AddressRange;

use super::worker::DiskWorker;
use crate::peer::PeerConnection;
use crate::segment_pool::SegmentPool;
use crate::tasks::{TaskError, in_memory};

/// Maximum number of promotions per poll period. The master returns one at a time.
const PROMOTE_BATCH: usize = 16;

impl DiskWorker {
    /// Promotes the objects that the master chose.
    pub(super) async fn promote(&self) {
        let arguments = ClientArguments { client_id: self.client_id() };
        for _ in 0..PROMOTE_BATCH {
            let fetched = self.membership.master.call::<PromotionObjectHeartbeat, &str>(&arguments).await;
            // Masters before 0.3.11 lack this call.
            let Ok(Ok(tasks)) = fetched else { return };
            if tasks.0.is_empty() {
                return;
            }
            for task in tasks.0 {
                let counts = &self.disk.counts;
                match self.promote_one(&task).await {
                    Ok(()) => _ = counts.promoted.fetch_add(1, Relaxed),
                    Err(error) => {
                        tracing::debug!(%error, "cannot promote an object; it stays on disk only");
                        counts.not_promoted.fetch_add(1, Relaxed);
                        self.revoke_promotion(&task).await;
                    }
                }
            }
        }
    }

    async fn promote_one(&self, task: &OffloadTask<String>) -> Result<(), TaskError> {
        let (master, client_id) = (&self.membership.master, self.client_id());
        let (key, tenant) = (task.key.as_str(), task.tenant_id.as_str());
        let size = u64::try_from(task.size).map_err(|_| TaskError::Sizes)?;
        let preferred_segments = vec![&*self.membership.endpoint];
        let arguments = PromotionArguments { client_id, key, tenant, size, preferred_segments };
        let allocated =
            master.call::<PromotionAllocStart, &str>(&arguments).await?.map_err(RpcError::from)?;
        self.load_into_replica(name(tenant, key), &allocated.memory).await?;
        let arguments = ClientKeyArguments { client_id, key, tenant };
        Ok(master.call::<NotifyPromotionSuccess, &str>(&arguments).await?.map_err(RpcError::from)?)
    }

    async fn load_into_replica(
        &self,
        name: String,
        target: &ReplicaDescriptor<String>,
    ) -> Result<(), TaskError> {
        let BufferDescriptor { size, address, endpoint, .. } = in_memory(target)?;
        let (size, address) = (*size, *address);
        let (tier, pool) = (Arc::clone(&self.disk.tier), Arc::clone(&self.membership.pool));
        if *endpoint == *self.membership.endpoint {
            let span = AddressRange { start: address, size };
            let loaded =
                tokio::task::spawn_blocking(move || read_into_pool(&tier, name.as_bytes(), &pool, span));
            return loaded.await.map_err(|_| TaskError::NotOnDisk)?;
        }
        let read = tokio::task::spawn_blocking(move || tier.get(name.as_bytes())).await;
        let bytes = read.map_err(|_| TaskError::NotOnDisk)??.ok_or(TaskError::NotOnDisk)?;
        if size != bytes.len() as u64 {
            return Err(TaskError::Sizes);
        }
        let authentication = self.membership.master.authentication();
        let mut to = PeerConnection::open(&self.directory, endpoint, authentication).await?;
        to.write(address, &bytes).await?;
        if to.protocol() == TransferProtocol::V1 {
            // V1 has no write acknowledgement. A read on the same connection completes after the write is applied.
            to.read(address + size - 1, &mut [0]).await?;
        }
        Ok(())
    }

    /// Best effort: the master expires promotions that are not completed.
    async fn revoke_promotion(&self, task: &OffloadTask<String>) {
        let (key, tenant) = (task.key.as_str(), task.tenant_id.as_str());
        let arguments = ClientKeyArguments { client_id: self.client_id(), key, tenant };
        let response = self.membership.master.call::<NotifyPromotionFailure, &str>(&arguments).await;
        if let Err(error) = response.and_then(|result| Ok(result?)) {
            tracing::debug!(%error, "cannot report a failed promotion to the master");
        }
    }
}

/// Reads an object from disk into this node's own memory without an intermediate copy.
fn read_into_pool(
    tier: &FileTier,
    name: &[u8],
    pool: &SegmentPool,
    span: AddressRange,
) -> Result<(), TaskError> {
    if tier.size(name).ok_or(TaskError::NotOnDisk)? != span.size {
        return Err(TaskError::Sizes);
    }
    pool.fill(span, |put| match tier.get_with(name, put)? {
        Some(size) if size == span.size => Ok(()),
        Some(_) => Err(TaskError::Sizes),
        None => Err(TaskError::NotOnDisk),
    })
}
