//! Offloads objects from memory to disk.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::disk::name;
use mooncake_wire::types::{OffloadTask, ReplicaList, ReplicaMedium, ReplicaStatus};
use moongate_master_client::rpc::RpcError;
use moongate_transfer::serve::AddressRange;

use super::NodeDisk;
use super::worker::{BATCH, DiskWorker, OffloadedObject};
use crate::segment_pool::SegmentPool;

impl DiskWorker {
    /// Offloads the objects that the master chose.
    pub(super) async fn offload(&self, mut tasks: Vec<OffloadTask<String>>) {
        tasks.sort_unstable_by(|one, other| one.tenant_id.cmp(&other.tenant_id));
        for tasks in tasks.chunk_by(|one, other| one.tenant_id == other.tenant_id) {
            for tasks in tasks.chunks(BATCH) {
                if let Err(error) = self.offload_batch(tasks).await {
                    tracing::warn!(%error, objects = tasks.len(), "offloading to disk failed");
                }
            }
        }
    }

    /// Offloads a batch of one tenant.
    async fn offload_batch(&self, tasks: &[OffloadTask<String>]) -> Result<(), RpcError> {
        let Some(OffloadTask { tenant_id: tenant, .. }) = tasks.first() else { return Ok(()) };
        let keys = || tasks.iter().map(|task| task.key.as_str()).collect();
        let located = self.replica_lists(tenant, keys()).await?;
        let mut jobs = Vec::with_capacity(tasks.len());
        for (task, located) in tasks.iter().zip(located) {
            let span = located.ok().and_then(|list| self.own_range(&list, task.size));
            jobs.push((name(tenant, &task.key), span));
        }
        let (disk, pool) = (Arc::clone(&self.disk), Arc::clone(&self.membership.pool));
        let written = tokio::task::spawn_blocking(move || {
            let write = |(name, span): (String, Option<AddressRange>)| {
                span.is_some_and(|span| disk.store_object(&pool, &name, span))
            };
            jobs.into_iter().map(write).collect::<Vec<bool>>()
        });
        let written = written.await.unwrap_or_default();
        let stored = |(index, task): (usize, &'_ OffloadTask<String>)| {
            if written.get(index) == Some(&true) { task.size } else { -1 }
        };
        let objects: Vec<OffloadedObject<'_>> = tasks
            .iter()
            .enumerate()
            .map(|(index, task)| OffloadedObject { tenant, key: &task.key, size: stored((index, task)) })
            .collect();
        let done = objects.iter().filter(|object| object.size >= 0).count() as u64;
        self.disk.counts.offloaded.fetch_add(done, Relaxed);
        self.disk.counts.not_offloaded.fetch_add(objects.len() as u64 - done, Relaxed);
        let reported = self.report_objects(&objects).await;
        // The master did not register the disk copy of an object that was replaced meanwhile. That copy is stale or a mix of
        // both versions, so it must not stay readable.
        let lists = self.replica_lists(tenant, keys()).await?;
        for (object, list) in objects.iter().zip(lists) {
            let is_registered = list.is_ok_and(|list| self.is_on_disk(&list));
            if object.size >= 0 && !is_registered {
                self.drop_object(&name(tenant, object.key));
            }
        }
        reported
    }

    /// The range of a complete replica of this size in this node's memory.
    fn own_range(&self, list: &ReplicaList<String>, size: i64) -> Option<AddressRange> {
        list.replicas.iter().find_map(|replica| match &replica.medium {
            ReplicaMedium::Memory(buffer)
                if replica.status == ReplicaStatus::COMPLETE
                    && buffer.endpoint == *self.membership.endpoint
                    && i64::try_from(buffer.size) == Ok(size) =>
            {
                Some(AddressRange { start: buffer.address, size: buffer.size })
            }
            _ => None,
        })
    }

    fn is_on_disk(&self, list: &ReplicaList<String>) -> bool {
        let is_own = |medium: &ReplicaMedium<String>| matches!(medium, ReplicaMedium::LocalDisk(disk) if disk.client_id == self.client_id());
        list.replicas.iter().any(|replica| is_own(&replica.medium))
    }
}

impl NodeDisk {
    /// Copies an object to disk. Returns whether the copy is complete and verified.
    fn store_object(&self, pool: &SegmentPool, name: &str, span: AddressRange) -> bool {
        if let Err(error) = pool.verify(span) {
            tracing::warn!(%error, "cannot offload an object to disk");
            return false;
        }
        let mut is_intact = true;
        let put = self.tier.put_with(name.as_bytes(), span.size, |offset, into| {
            let part = AddressRange { start: span.start + offset, size: into.len() as u64 };
            is_intact &= pool.read(part, into).is_ok();
        });
        match put {
            Ok(()) if is_intact => true,
            Ok(()) => {
                // A part could not be read, so the stored bytes are not the object's.
                let _ = self.tier.remove(name.as_bytes());
                false
            }
            Err(error) => {
                tracing::warn!(%error, "cannot offload an object to disk");
                false
            }
        }
    }
}
