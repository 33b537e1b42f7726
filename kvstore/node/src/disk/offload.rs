//! From memory to the disk.

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
    /// Puts objects on the disk that the master has chosen.
    pub(super) async fn offload(&self, mut tasks: Vec<OffloadTask<String>>) {
        tasks.sort_unstable_by(|one, other| one.tenant_id.cmp(&other.tenant_id));
        for tasks in tasks.chunk_by(|one, other| one.tenant_id == other.tenant_id) {
            for tasks in tasks.chunks(BATCH) {
                if let Err(error) = self.offload_batch(tasks).await {
                    tracing::warn!(%error, objects = tasks.len(), "objects did not come to the disk");
                }
            }
        }
    }

    /// The same with some objects of one tenant.
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
        let stored = |(at, task): (usize, &'_ OffloadTask<String>)| {
            if written.get(at) == Some(&true) { task.size } else { -1 }
        };
        let objects: Vec<OffloadedObject<'_>> = tasks
            .iter()
            .enumerate()
            .map(|(at, task)| OffloadedObject { tenant, key: &task.key, size: stored((at, task)) })
            .collect();
        let done = objects.iter().filter(|object| object.size >= 0).count() as u64;
        self.disk.counts.offloaded.fetch_add(done, Relaxed);
        self.disk.counts.not_offloaded.fetch_add(objects.len() as u64 - done, Relaxed);
        let told = self.report_objects(&objects).await;
        // An object that was replaced meanwhile is not on the disk as far as the master knows. Nobody must find there what
        // it was, or a mixture of both.
        let known = self.replica_lists(tenant, keys()).await?;
        for (object, known) in objects.iter().zip(known) {
            let is_known = known.is_ok_and(|list| self.is_on_disk(&list));
            if object.size >= 0 && !is_known {
                self.drop_object(&name(tenant, object.key));
            }
        }
        told
    }

    /// Where an object is in this node's memory.
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
        let is_ours = |medium: &ReplicaMedium<String>| matches!(medium, ReplicaMedium::LocalDisk(disk) if disk.client_id == self.client_id());
        list.replicas.iter().any(|replica| is_ours(&replica.medium))
    }
}

impl NodeDisk {
    /// Copies an object to the disk. Whether it is there as it was written.
    fn store_object(&self, pool: &SegmentPool, name: &str, span: AddressRange) -> bool {
        if let Err(error) = pool.verify(span) {
            tracing::warn!(%error, "an object is not put on the disk");
            return false;
        }
        let mut is_whole = true;
        let put = self.tier.put_with(name.as_bytes(), span.size, |offset, into| {
            let part = AddressRange { start: span.start + offset, size: into.len() as u64 };
            is_whole &= pool.read(part, into).is_ok();
        });
        match put {
            Ok(()) if is_whole => true,
            Ok(()) => {
                // Its page would tell of bytes that nobody wrote.
                let _ = self.tier.remove(name.as_bytes());
                false
            }
            Err(error) => {
                tracing::warn!(%error, "an object is not put on the disk");
                false
            }
        }
    }
}
