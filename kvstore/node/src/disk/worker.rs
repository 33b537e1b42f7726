//! Executes the master's disk tasks, and reports to it which objects are on disk.

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
use moongate_runtime::net::TcpListener;
use moongate_transfer::DescriptorDirectory;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::NodeDisk;
use super::serve::{self, DiskReadAccess};
use crate::membership::NodeMembership;

/// Poll period for the master's disk tasks.
const PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of objects in one request to the master.
pub(super) const BATCH: usize = 256;
/// Delay of the second report of a restored disk: by then the master has expired the client of the previous process, under which
/// the objects were registered.
const RECHECK_DELAY: Duration = Duration::from_secs(30);

/// Keeps the disk and the master's record of it consistent.
#[derive(Clone, Debug)]
pub(crate) struct DiskWorker {
    pub(crate) disk: Arc<NodeDisk>,
    pub(super) membership: NodeMembership,
    pub(super) directory: DescriptorDirectory,
    /// Address of the port for disk reads.
    endpoint: Arc<str>,
    /// Cancelled when the disk is unmounted before the node stops.
    unmounting: CancellationToken,
}

/// Progress of reconciling the disk with the master.
struct DiskReconcileState {
    reported: bool,
    recheck_at: Option<Instant>,
}

impl DiskWorker {
    /// `endpoint` is the address of the port for disk reads.
    pub(crate) fn new(
        disk: Arc<NodeDisk>,
        membership: NodeMembership,
        directory: DescriptorDirectory,
        endpoint: &str,
    ) -> Self {
        Self { disk, membership, directory, endpoint: endpoint.into(), unmounting: CancellationToken::new() }
    }

    /// Serves disk reads at this port until the supervisor shuts down, and executes the master's disk tasks until then or until the
    /// disk is unmounted.
    pub(crate) fn start(&self, listener: TcpListener, access: DiskReadAccess, supervisor: &Supervisor) {
        let endpoint = Arc::clone(&self.membership.endpoint);
        serve::listen(listener, Arc::clone(&self.disk), endpoint, access, supervisor);
        let (worker, stop) = (self.clone(), supervisor.token());
        supervisor.spawn_essential("store-disk", async move {
            let leaving = worker.unmounting.clone();
            tokio::select! {
                () = stop.cancelled() => {}
                () = leaving.cancelled() => {}
                () = worker.run() => {}
            }
        });
    }

    /// Unmounts the disk from the store.
    ///
    /// # Errors
    /// When the master refuses or does not answer.
    pub(crate) async fn unmount(&self) -> Result<(), RpcError> {
        self.unmounting.cancel();
        let arguments = ClientArguments { client_id: self.membership.client_id };
        Ok(self.membership.master.call::<UnmountLocalDiskSegment, &str>(&arguments).await??)
    }

    /// Flushes the tier at shutdown, so that the next run restores its objects.
    pub(crate) async fn shut_down(&self) {
        self.unmounting.cancel();
        let tier = Arc::clone(&self.disk.tier);
        let synced = tokio::task::spawn_blocking(move || tier.sync()).await;
        if let Ok(Err(error)) = synced {
            tracing::warn!(%error, "cannot flush the disk tier; its objects are lost if the machine crashes now");
        }
    }

    async fn run(&self) {
        let recheck_at = self.disk.tier.is_restored().then(|| Instant::now() + RECHECK_DELAY);
        let mut state = DiskReconcileState { reported: false, recheck_at };
        let mut warned = false;
        loop {
            match self.run_once(&mut state).await {
                Ok(()) => warned = false,
                Err(error) if !warned => {
                    warned = true;
                    tracing::warn!(%error, "cannot synchronize the disk with the master; retrying");
                }
                Err(error) => tracing::debug!(%error, "cannot synchronize the disk with the master"),
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    async fn run_once(&self, state: &mut DiskReconcileState) -> Result<(), RpcError> {
        let (tasks, was_mounted) = match self.fetch().await? {
            Err(ErrorCode::SEGMENT_NOT_FOUND) => {
                self.mount().await?;
                state.reported = false;
                (self.fetch().await??, false)
            }
            tasks => (tasks?, true),
        };
        let is_due = state.recheck_at.is_some_and(|time| time <= Instant::now());
        if !state.reported || is_due {
            self.reconcile(was_mounted && !is_due).await?;
            state.reported = true;
            state.recheck_at = state.recheck_at.filter(|_| !is_due);
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
        let response = master.call::<ReportSsdCapacity, &str>(&capacity).await;
        if let Err(error) = response.and_then(|result| Ok(result?)) {
            // Masters before 0.3.11 lack this call.
            tracing::debug!(%error, "cannot report the disk's capacity to the master");
        }
        Ok(())
    }

    /// Reconciles the disk with the master. Objects that the master has elsewhere are removed from disk. Objects that it lacks
    /// are reported to it, unless the disk `was_mounted` already: then the master removed them, and they are removed here too.
    async fn reconcile(&self, was_mounted: bool) -> Result<(), RpcError> {
        let keys = self.disk.tier.keys();
        for chunk in keys.chunks(BATCH) {
            let names: Vec<&str> = chunk.iter().filter_map(|name| std::str::from_utf8(name).ok()).collect();
            for (tenant, names) in by_tenant(&names) {
                let keys: Vec<&str> = names.iter().map(|name| tenant_and_key(name).1).collect();
                let lists = self.replica_lists(tenant, keys).await?;
                let mut missing = Vec::new();
                for (name, list) in names.iter().zip(lists) {
                    match list {
                        Ok(list) => self.reconcile_object(name, &list, &mut missing),
                        Err(ErrorCode::OBJECT_NOT_FOUND) if !was_mounted => missing.push(*name),
                        Err(ErrorCode::OBJECT_NOT_FOUND) => self.drop_object(name),
                        // A put of this key is in progress, so the disk copy is outdated if it succeeds.
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

    /// Reconciles an object that the master has: keeps it, adds it to `missing` for a report, or removes it from disk.
    fn reconcile_object<'a>(&self, name: &'a str, list: &ReplicaList<String>, missing: &mut Vec<&'a str>) {
        let disks = list.replicas.iter().filter_map(|replica| match &replica.medium {
            ReplicaMedium::LocalDisk(disk) => Some(disk),
            _ => None,
        });
        let disks: Vec<_> = disks.collect();
        match disks.iter().find(|disk| disk.client_id == self.membership.client_id) {
            Some(disk) if disk.transport_endpoint == *self.endpoint => {}
            // The master sends readers to a port of the previous run.
            Some(_) => missing.push(name),
            // The replica may be on this disk, registered by the previous process's client.
            None if !disks.is_empty() => missing.push(name),
            // The object was written again since, so the bytes on disk may be an older version's.
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
            tracing::warn!(%error, "cannot remove an object from disk");
        }
    }

    /// Fetches the master's replica lists of objects, in the keys' order.
    pub(super) async fn replica_lists(
        &self,
        tenant: &str,
        keys: Vec<&str>,
    ) -> Result<Vec<MasterResult<ReplicaList<String>>>, RpcError> {
        self.membership.master.call::<BatchGetReplicaList, &str>(&KeysArguments { keys, tenant }).await
    }

    /// Reports to the master which objects are on disk, and which offloads failed.
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

    /// Clears the disk after a remove-all on the master.
    async fn clear(&self) {
        let arguments = ClientArguments { client_id: self.membership.client_id };
        // Masters before 0.3.12 lack this call.
        if !matches!(self.membership.master.call::<PollRemoveAll, &str>(&arguments).await, Ok(Ok(true))) {
            return;
        }
        let tier = Arc::clone(&self.disk.tier);
        let cleared = tokio::task::spawn_blocking(move || {
            tier.keys().iter().try_for_each(|key| tier.remove(key).map(drop))
        });
        if let Ok(Err(error)) = cleared.await {
            tracing::warn!(%error, "cannot clear the disk");
        }
    }

    /// Reports to the master which objects were evicted from disk, or dropped as damaged.
    async fn report_evicted(&self) {
        let evicted = self.disk.tier.take_evicted_keys();
        let is_absent = |name: &&Arc<[u8]>| !self.disk.tier.contains(name);
        let names: Vec<&str> =
            evicted.iter().filter(is_absent).filter_map(|name| std::str::from_utf8(name).ok()).collect();
        let (client_id, replica_type) = (self.membership.client_id, ReplicaType::LOCAL_DISK);
        for chunk in names.chunks(BATCH) {
            for (tenant, names) in by_tenant(chunk) {
                let keys = names.iter().map(|name| tenant_and_key(name).1).collect();
                let arguments = BatchEvictDiskArguments { client_id, keys, tenant, replica_type };
                let response = self.membership.master.call::<BatchEvictDiskReplica, &str>(&arguments).await;
                if let Err(error) = response {
                    tracing::warn!(%error, objects = names.len(), "cannot report evictions from disk to the master");
                }
            }
        }
    }

    pub(super) fn client_id(&self) -> Uuid {
        self.membership.client_id
    }
}

/// An object on disk. A negative size reports a failed offload.
#[derive(Clone, Copy, Debug)]
pub(super) struct OffloadedObject<'a> {
    pub(super) tenant: &'a str,
    pub(super) key: &'a str,
    pub(super) size: i64,
}

fn by_tenant<'a>(names: &[&'a str]) -> Vec<(&'a str, Vec<&'a str>)> {
    let mut tenants: Vec<(&str, Vec<&str>)> = Vec::new();
    for name in names {
        let (tenant, _) = tenant_and_key(name);
        match tenants.iter_mut().find(|(existing, _)| *existing == tenant) {
            Some((_, names)) => names.push(name),
            None => tenants.push((tenant, vec![name])),
        }
    }
    tenants
}
