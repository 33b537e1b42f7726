//! Does with the disk what the master asks, and tells it what is there.

use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::ErrorCode;
use mooncake_wire::disk::tenant_and_key;
use mooncake_wire::rpc::{
    BatchEvictDiskArguments, BatchEvictDiskReplica, BatchGetReplicaList, ClientArguments, KeysArguments,
    MasterResult, MountLocalDiskSegment, NotifyOffloadSuccess, OffloadObjectHeartbeat, OffloadedArguments,
    OffloadingArguments, PollRemoveAll, ReportSsdCapacity, SsdCapacityArguments, UnmountLocalDiskSegment,
};
use mooncake_wire::types::{
    OffloadTask, OffloadTasks, ReplicaList, ReplicaMedium, ReplicaType, StorageObjectMetadata, Uuid,
};
use moongate_master_client::rpc::RpcError;
use moongate_runtime::Supervisor;
use moongate_transfer::DescriptorDirectory;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::NodeDisk;
use crate::membership::NodeMembership;

/// Time between two questions for work.
const PERIOD: Duration = Duration::from_secs(1);
/// Objects that the master is asked or told about at a time.
pub(super) const BATCH: usize = 256;
/// When what a new node found on its disk is told again: by then the master has forgotten the one before it, whose
/// disk this was.
const RECHECK_DELAY: Duration = Duration::from_secs(30);

/// Keeps disk and master in step.
#[derive(Clone, Debug)]
pub(crate) struct DiskWorker {
    pub(crate) disk: Arc<NodeDisk>,
    pub(crate) membership: NodeMembership,
    pub(crate) directory: DescriptorDirectory,
    /// Where readers ask for what is on the disk.
    pub(crate) endpoint: Arc<str>,
    /// Cancelled when the disk leaves the store before the node does.
    pub(crate) unmounting: CancellationToken,
}

/// How far master and disk have been compared.
struct DiskReconcileState {
    reported: bool,
    recheck_at: Option<Instant>,
}

impl DiskWorker {
    /// Works until the supervisor shuts down, or the disk leaves.
    pub(crate) fn start(self, supervisor: &Supervisor) {
        let stop = supervisor.token();
        supervisor.spawn_essential("store-disk", async move {
            let leaving = self.unmounting.clone();
            tokio::select! {
                () = stop.cancelled() => {}
                () = leaving.cancelled() => {}
                () = self.run() => {}
            }
        });
    }

    /// Takes the disk out of the store.
    ///
    /// # Errors
    /// As the master.
    pub(crate) async fn unmount(&self) -> Result<(), RpcError> {
        self.unmounting.cancel();
        let arguments = ClientArguments { client_id: self.membership.client_id };
        Ok(self.membership.master.call::<UnmountLocalDiskSegment, &str>(&arguments).await??)
    }

    /// The node ends: what is on the disk is found there by its next run.
    pub(crate) async fn shut_down(&self) {
        self.unmounting.cancel();
        let tier = Arc::clone(&self.disk.tier);
        let settled = tokio::task::spawn_blocking(move || tier.sync()).await;
        if let Ok(Err(error)) = settled {
            tracing::warn!(%error, "what is on the disk is lost if the machine ends now");
        }
    }

    async fn run(&self) {
        let again = self.disk.tier.is_restored().then(|| Instant::now() + RECHECK_DELAY);
        let mut compared = DiskReconcileState { reported: false, recheck_at: again };
        let mut complained = false;
        loop {
            match self.run_once(&mut compared).await {
                Ok(()) => complained = false,
                Err(error) if !complained => {
                    complained = true;
                    tracing::warn!(%error, "the master does not use this node's disk; trying again");
                }
                Err(error) => tracing::debug!(%error, "the master does not use this node's disk"),
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    async fn run_once(&self, compared: &mut DiskReconcileState) -> Result<(), RpcError> {
        let (tasks, knows) = match self.fetch().await? {
            Err(ErrorCode::SEGMENT_NOT_FOUND) => {
                self.mount().await?;
                compared.reported = false;
                (self.fetch().await??, false)
            }
            tasks => (tasks?, true),
        };
        let is_due = compared.recheck_at.is_some_and(|at| at <= Instant::now());
        if !compared.reported || is_due {
            self.compare(knows && !is_due).await?;
            compared.reported = true;
            compared.recheck_at = compared.recheck_at.filter(|_| !is_due);
        }
        self.clear().await;
        self.offload(tasks.0).await;
        self.promote().await;
        self.report_evicted().await;
        Ok(())
    }

    async fn fetch(&self) -> Result<MasterResult<OffloadTasks<String>>, RpcError> {
        let arguments = OffloadingArguments { client_id: self.membership.client_id, enable_offloading: true };
        self.membership.master.call::<OffloadObjectHeartbeat, &str>(&arguments).await
    }

    async fn mount(&self) -> Result<(), RpcError> {
        let (master, client_id) = (&self.membership.master, self.membership.client_id);
        let arguments = OffloadingArguments { client_id, enable_offloading: true };
        master.call::<MountLocalDiskSegment, &str>(&arguments).await??;
        let total_bytes = i64::try_from(self.disk.capacity).unwrap_or(i64::MAX);
        let capacity = SsdCapacityArguments { client_id, total_bytes };
        let told = master.call::<ReportSsdCapacity, &str>(&capacity).await;
        if let Err(error) = told.and_then(|answer| Ok(answer?)) {
            // Masters before 0.3.11 do not ask.
            tracing::debug!(%error, "the master was not told how large the disk is");
        }
        Ok(())
    }

    /// Brings disk and master in step: what the master has in another way leaves the disk, and what it does not have is
    /// told to it. Unless it `knows` this disk: then it has removed what it does not have.
    async fn compare(&self, knows: bool) -> Result<(), RpcError> {
        let keys = self.disk.tier.keys();
        for chunk in keys.chunks(BATCH) {
            let names: Vec<&str> = chunk.iter().filter_map(|name| std::str::from_utf8(name).ok()).collect();
            for (tenant, names) in by_tenant(&names) {
                let keys: Vec<&str> = names.iter().map(|name| tenant_and_key(name).1).collect();
                let known = self.replica_lists(tenant, keys).await?;
                let mut missing = Vec::new();
                for (name, known) in names.iter().zip(known) {
                    match known {
                        Ok(list) => self.reconcile_object(name, &list, &mut missing),
                        Err(ErrorCode::OBJECT_NOT_FOUND) if !knows => missing.push(*name),
                        Err(ErrorCode::OBJECT_NOT_FOUND) => self.drop_object(name),
                        // It is being written, and what becomes of it is not known yet.
                        Err(_) => self.drop_object(name),
                    }
                }
                let tasks: Vec<OffloadedObject<'_>> =
                    missing.iter().filter_map(|name| self.stored(name)).collect();
                self.report_objects(&tasks).await?;
            }
        }
        Ok(())
    }

    /// The master has an object of that name.
    fn reconcile_object<'a>(&self, name: &'a str, list: &ReplicaList<String>, missing: &mut Vec<&'a str>) {
        let disks = list.replicas.iter().filter_map(|replica| match &replica.medium {
            ReplicaMedium::LocalDisk(disk) => Some(disk),
            _ => None,
        });
        let disks: Vec<_> = disks.collect();
        match disks.iter().find(|disk| disk.client_id == self.membership.client_id) {
            Some(disk) if disk.transport_endpoint == *self.endpoint => {}
            // Readers are sent to a port of the run before.
            Some(_) => missing.push(name),
            // The disk may be this one, and the client the process before this one.
            None if !disks.is_empty() => missing.push(name),
            // It has been written anew since: nobody knows whether the bytes are the same.
            None => self.drop_object(name),
        }
    }

    fn stored<'a>(&self, name: &'a str) -> Option<OffloadedObject<'a>> {
        let (tenant, key) = tenant_and_key(name);
        let size = self.disk.tier.size(name.as_bytes())?;
        Some(OffloadedObject { tenant, key, size: i64::try_from(size).ok()? })
    }

    pub(super) fn drop_object(&self, name: &str) {
        if let Err(error) = self.disk.tier.remove(name.as_bytes()) {
            tracing::warn!(%error, "an object cannot be removed from the disk");
        }
    }

    /// Where objects are, as the master knows it.
    pub(super) async fn replica_lists(
        &self,
        tenant: &str,
        keys: Vec<&str>,
    ) -> Result<Vec<MasterResult<ReplicaList<String>>>, RpcError> {
        self.membership.master.call::<BatchGetReplicaList, &str>(&KeysArguments { keys, tenant }).await
    }

    /// Tells the master what is on the disk, or is not although it should be.
    pub(super) async fn report_objects(&self, objects: &[OffloadedObject<'_>]) -> Result<(), RpcError> {
        if objects.is_empty() {
            return Ok(());
        }
        let task = |it: &OffloadedObject<'_>| OffloadTask {
            tenant_id: it.tenant.to_owned(),
            key: it.key.to_owned(),
            size: it.size.max(0),
        };
        let stored = |it: &OffloadedObject<'_>| StorageObjectMetadata {
            bucket_id: if it.size < 0 { -1 } else { 0 },
            offset: 0,
            key_size: i64::try_from(it.key.len()).unwrap_or(i64::MAX),
            data_size: it.size,
            transport_endpoint: self.endpoint.to_string(),
        };
        let arguments = OffloadedArguments {
            client_id: self.membership.client_id,
            tasks: objects.iter().map(task).collect(),
            stored: objects.iter().map(stored).collect(),
        };
        Ok(self.membership.master.call::<NotifyOffloadSuccess, String>(&arguments).await??)
    }

    /// Empties the disk if all objects were removed.
    async fn clear(&self) {
        let arguments = ClientArguments { client_id: self.membership.client_id };
        // Masters before 0.3.12 do not know the question.
        if !matches!(self.membership.master.call::<PollRemoveAll, &str>(&arguments).await, Ok(Ok(true))) {
            return;
        }
        let tier = Arc::clone(&self.disk.tier);
        let cleared = tokio::task::spawn_blocking(move || {
            tier.keys().iter().try_for_each(|key| tier.remove(key).map(drop))
        });
        if let Ok(Err(error)) = cleared.await {
            tracing::warn!(%error, "the disk cannot be emptied");
        }
    }

    /// Tells the master what has made room for others, or was damaged.
    async fn report_evicted(&self) {
        let gone = self.disk.tier.take_evicted_keys();
        let is_gone = |name: &&Arc<[u8]>| !self.disk.tier.contains(name);
        let names: Vec<&str> =
            gone.iter().filter(is_gone).filter_map(|name| std::str::from_utf8(name).ok()).collect();
        let (client_id, replica_type) = (self.membership.client_id, ReplicaType::LOCAL_DISK);
        for chunk in names.chunks(BATCH) {
            for (tenant, names) in by_tenant(chunk) {
                let keys = names.iter().map(|name| tenant_and_key(name).1).collect();
                let arguments = BatchEvictDiskArguments { client_id, keys, tenant, replica_type };
                let told = self.membership.master.call::<BatchEvictDiskReplica, &str>(&arguments).await;
                if let Err(error) = told {
                    tracing::warn!(%error, objects = names.len(), "the master was not told what has left the disk");
                }
            }
        }
    }

    pub(super) fn client_id(&self) -> Uuid {
        self.membership.client_id
    }
}

/// An object on the disk, or one that did not come there if its size is negative.
#[derive(Clone, Copy, Debug)]
pub(super) struct OffloadedObject<'a> {
    pub(super) tenant: &'a str,
    pub(super) key: &'a str,
    pub(super) size: i64,
}

/// Names by whose they are.
fn by_tenant<'a>(names: &[&'a str]) -> Vec<(&'a str, Vec<&'a str>)> {
    let mut tenants: Vec<(&str, Vec<&str>)> = Vec::new();
    for name in names {
        let (tenant, _) = tenant_and_key(name);
        match tenants.iter_mut().find(|(known, _)| *known == tenant) {
            Some((_, names)) => names.push(name),
            None => tenants.push((tenant, vec![name])),
        }
    }
    tenants
}
