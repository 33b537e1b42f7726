//! From the disk back to memory.

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

/// Objects in one turn: the master tells one at a time.
const PROMOTE_BATCH: usize = 16;

impl DiskWorker {
    /// Brings objects back that the master has chosen.
    pub(super) async fn promote(&self) {
        let arguments = ClientArguments { client_id: self.client_id() };
        for _ in 0..PROMOTE_BATCH {
            let told = self.membership.master.call::<PromotionObjectHeartbeat, &str>(&arguments).await;
            // Masters before 0.3.11 bring nothing back.
            let Ok(Ok(tasks)) = told else { return };
            if tasks.0.is_empty() {
                return;
            }
            for task in tasks.0 {
                let counts = &self.disk.counts;
                match self.promote_one(&task).await {
                    Ok(()) => _ = counts.promoted.fetch_add(1, Relaxed),
                    Err(error) => {
                        tracing::debug!(%error, "an object stays on the disk alone");
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
        let room = master.call::<PromotionAllocStart, &str>(&arguments).await?.map_err(RpcError::from)?;
        self.load_into_replica(name(tenant, key), &room.memory).await?;
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
            let brought =
                tokio::task::spawn_blocking(move || read_into_pool(&tier, name.as_bytes(), &pool, span));
            return brought.await.map_err(|_| TaskError::NotOnDisk)?;
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
            // Nobody has told that it was written. What is read on the same connection has been.
            to.read(address + size - 1, &mut [0]).await?;
        }
        Ok(())
    }

    /// The master gives up what nobody does after a while.
    async fn revoke_promotion(&self, task: &OffloadTask<String>) {
        let (key, tenant) = (task.key.as_str(), task.tenant_id.as_str());
        let arguments = ClientKeyArguments { client_id: self.client_id(), key, tenant };
        let told = self.membership.master.call::<NotifyPromotionFailure, &str>(&arguments).await;
        if let Err(error) = told.and_then(|answer| Ok(answer?)) {
            tracing::debug!(%error, "the master was not told that an object stays on the disk");
        }
    }
}

/// From the disk to this node's own memory, without a copy in between.
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
