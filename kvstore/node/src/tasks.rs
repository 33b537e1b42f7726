//! Executes the master's copy and move tasks, including those of a drain.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::{
    ClientKeyArguments, CompleteTaskArguments, CopyEnd, CopyRevoke, CopyStart, CopyStartArguments,
    DynamicCopyEndArguments, DynamicCopyStartArguments, DynamicReplicaCopyEnd, DynamicReplicaCopyRevoke,
    DynamicReplicaCopyStart, FetchTasks, FetchTasksArguments, MarkTaskToComplete, MoveEnd, MoveRevoke,
    MoveStart, MoveStartArguments,
};
use mooncake_wire::types::{
    BufferDescriptor, DEFAULT_TENANT, ReplicaDescriptor, ReplicaMedium, TaskAssignment, TaskCompletion,
    TaskStatus, TaskType, Uuid,
};
use moongate_master_client::rpc::RpcError;
use moongate_runtime::Supervisor;
use moongate_transfer::serve::AddressRange;
use moongate_transfer::{DescriptorDirectory, TransferError};
use serde::Deserialize;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::membership::NodeMembership;
use crate::peer::{IdlePeers, PeerConnectError, PeerConnection};
use crate::segment_pool::{DamagedRangeError, SegmentPool};

/// Longest poll period for the master's tasks, while there are none.
const MAX_PERIOD: Duration = Duration::from_secs(1);
/// Poll period right after a task: a drain job continues with others as soon as some have ended.
const MIN_PERIOD: Duration = Duration::from_millis(5);
/// Maximum number of concurrent tasks: enough that small objects, which take four calls to the master each, use the network.
const MAX_CONCURRENT_TASKS: usize = 32;
/// Buffer size per task in bytes: an object is copied in chunks of this size.
const CHUNK: u64 = 1 << 20;
/// First pause after the master found no space for a target. It grows linearly with each attempt.
const ALLOCATION_BACKOFF: Duration = Duration::from_millis(50);
/// Maximum number of retries, even if the master allows more.
const MAX_ATTEMPTS: u32 = 10;

/// Counters of finished tasks and of bytes copied.
#[derive(Debug, Default)]
pub(crate) struct TaskCounts {
    pub(crate) done: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

/// Polls for the master's tasks and executes them.
#[derive(Clone, Debug)]
pub(crate) struct TaskWorker {
    pub(crate) membership: NodeMembership,
    pub(crate) directory: DescriptorDirectory,
    pub(crate) counts: Arc<TaskCounts>,
    pub(crate) idle_peers: Arc<IdlePeers>,
}

/// Why a task failed; the text is reported to the master.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TaskError {
    #[error("the master: {0}")]
    Master(#[from] RpcError),
    #[error("cannot parse the task: {0}")]
    Payload(#[from] serde_json::Error),
    #[error("unknown task type {0:?}")]
    Unknown(TaskType),
    #[error("a replica is not in memory")]
    NotInMemory,
    #[error("source and target have different sizes")]
    Sizes,
    #[error("the object is no longer on disk")]
    NotOnDisk,
    #[error(transparent)]
    Disk(#[from] moongate_tier::TierError),
    #[error(transparent)]
    Source(#[from] DamagedRangeError),
    #[error(transparent)]
    Connect(#[from] PeerConnectError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

#[derive(Debug, Deserialize)]
struct CopyTask {
    #[serde(default = "default_tenant")]
    tenant_id: String,
    key: String,
    source: String,
    targets: Vec<String>,
    #[serde(default)]
    dynamic_replication_lease_id_high: u64,
    #[serde(default)]
    dynamic_replication_lease_id_low: u64,
    #[serde(default)]
    dynamic_replication_version_epoch: u64,
}

#[derive(Debug, Deserialize)]
struct MoveTask {
    #[serde(default = "default_tenant")]
    tenant_id: String,
    key: String,
    source: String,
    target: String,
}

fn default_tenant() -> String {
    DEFAULT_TENANT.to_owned()
}

impl TaskWorker {
    /// Runs until the supervisor shuts down.
    pub(crate) fn start(self, supervisor: &Supervisor) {
        let (tasks, stop) = (supervisor.clone(), supervisor.token());
        supervisor.spawn_essential("store-tasks", async move {
            stop.run_until_cancelled(self.run(&tasks)).await;
        });
    }

    async fn run(self, supervisor: &Supervisor) {
        let slots = Arc::new(Semaphore::new(MAX_CONCURRENT_TASKS));
        let ended = Arc::new(Notify::new());
        let mut period = MAX_PERIOD;
        loop {
            // Ends early when a task has ended: the master may have others by then.
            let woken = tokio::time::timeout(period, ended.notified()).await.is_ok();
            // Only as many as can start now: the master assigns a task to one node, so a queued task would wait here.
            let free: Vec<OwnedSemaphorePermit> =
                std::iter::from_fn(|| Arc::clone(&slots).try_acquire_owned().ok()).collect();
            let is_idle = free.len() == MAX_CONCURRENT_TASKS;
            let started = self.fetch_and_start(free, &ended, supervisor).await;
            period = if woken || started > 0 { MIN_PERIOD } else { MAX_PERIOD.min(period * 2) };
            if is_idle && started == 0 && period == MAX_PERIOD {
                self.idle_peers.clear();
            }
        }
    }

    /// Starts as many tasks as there are free slots. Returns their number.
    async fn fetch_and_start(
        &self,
        mut free: Vec<OwnedSemaphorePermit>,
        ended: &Arc<Notify>,
        supervisor: &Supervisor,
    ) -> usize {
        if free.is_empty() {
            return 0;
        }
        let arguments =
            FetchTasksArguments { client_id: self.membership.client_id, limit: free.len() as u64 };
        let fetched = self.membership.master.call::<FetchTasks, &str>(&arguments).await;
        let assigned = match fetched.and_then(|result| Ok(result?)) {
            Ok(assigned) => assigned,
            Err(error) => {
                tracing::debug!(%error, "cannot fetch tasks from the master");
                return 0;
            }
        };
        let count = assigned.len();
        for assignment in assigned {
            let (worker, slot, ended) = (self.clone(), free.pop(), Arc::clone(ended));
            let stop = supervisor.token();
            supervisor.spawn("store-task", async move {
                stop.run_until_cancelled(worker.perform(assignment)).await;
                drop(slot);
                ended.notify_one();
            });
        }
        count
    }

    async fn perform(&self, assignment: TaskAssignment<String>) {
        let mut attempt = 0;
        let result = loop {
            let result = self.attempt(&assignment).await;
            let no_space =
                matches!(&result, Err(TaskError::Master(RpcError::Refused(ErrorCode::NO_AVAILABLE_HANDLE))));
            if !no_space || attempt >= assignment.max_retry_attempts.min(MAX_ATTEMPTS) {
                break result;
            }
            attempt += 1;
            tokio::time::sleep(ALLOCATION_BACKOFF * attempt).await;
        };
        let (status, count, message) = match &result {
            Ok(()) => (TaskStatus::SUCCESS, &self.counts.done, "Task completed successfully".to_owned()),
            Err(error) => {
                tracing::warn!(task = %assignment.id, %error, "a copy or move task failed");
                (TaskStatus::FAILED, &self.counts.failed, error.to_string())
            }
        };
        count.fetch_add(1, Ordering::Relaxed);
        let completion = TaskCompletion { id: assignment.id, status, message: message.as_str() };
        let arguments = CompleteTaskArguments { client_id: self.membership.client_id, completion };
        let response = self.membership.master.call::<MarkTaskToComplete, &str>(&arguments).await;
        if let Err(error) = response.and_then(|result| Ok(result?)) {
            tracing::warn!(task = %assignment.id, %error, "cannot report a task's result to the master");
        }
    }

    async fn attempt(&self, assignment: &TaskAssignment<String>) -> Result<(), TaskError> {
        match assignment.task_type {
            TaskType::REPLICA_COPY => self.copy(&serde_json::from_str(&assignment.payload)?).await,
            TaskType::REPLICA_MOVE => self.move_object(&serde_json::from_str(&assignment.payload)?).await,
            other => Err(TaskError::Unknown(other)),
        }
    }

    async fn copy(&self, copy: &CopyTask) -> Result<(), TaskError> {
        let (client_id, key, tenant) = (self.membership.client_id, &*copy.key, &*copy.tenant_id);
        let lease_id = Uuid {
            first: copy.dynamic_replication_lease_id_high,
            second: copy.dynamic_replication_lease_id_low,
        };
        let master = &self.membership.master;
        let targets: Vec<&str> = copy.targets.iter().map(String::as_str).collect();
        let version_epoch = copy.dynamic_replication_version_epoch;
        if lease_id == Uuid::default() {
            let source = &*copy.source;
            let start = CopyStartArguments { client_id, key, tenant, source, targets };
            let plan = master.call::<CopyStart, &str>(&start).await?.map_err(RpcError::from)?;
            let end = ClientKeyArguments { client_id, key, tenant };
            match self.transfer(&plan.source, &plan.targets).await {
                Ok(()) => Ok(master.call::<CopyEnd, &str>(&end).await?.map_err(RpcError::from)?),
                Err(error) => {
                    log_revocation(master.call::<CopyRevoke, &str>(&end).await);
                    Err(error)
                }
            }
        } else {
            let source = &*copy.source;
            let start = DynamicCopyStartArguments {
                client_id,
                key,
                tenant,
                source,
                targets,
                lease_id,
                version_epoch,
            };
            let plan = master.call::<DynamicReplicaCopyStart, &str>(&start).await?.map_err(RpcError::from)?;
            let end = DynamicCopyEndArguments { client_id, key, tenant, lease_id, version_epoch };
            match self.transfer(&plan.source, &plan.targets).await {
                Ok(()) => {
                    Ok(master.call::<DynamicReplicaCopyEnd, &str>(&end).await?.map_err(RpcError::from)?)
                }
                Err(error) => {
                    log_revocation(master.call::<DynamicReplicaCopyRevoke, &str>(&end).await);
                    Err(error)
                }
            }
        }
    }

    async fn move_object(&self, task: &MoveTask) -> Result<(), TaskError> {
        let (client_id, key, tenant) = (self.membership.client_id, &*task.key, &*task.tenant_id);
        let master = &self.membership.master;
        let start =
            MoveStartArguments { client_id, key, tenant, source: &*task.source, target: &*task.target };
        let plan = master.call::<MoveStart, &str>(&start).await?.map_err(RpcError::from)?;
        let end = ClientKeyArguments { client_id, key, tenant };
        // No target means that the object is on the target segment already.
        match self.transfer(&plan.source, plan.target.as_slice()).await {
            Ok(()) => Ok(master.call::<MoveEnd, &str>(&end).await?.map_err(RpcError::from)?),
            Err(error) => {
                log_revocation(master.call::<MoveRevoke, &str>(&end).await);
                Err(error)
            }
        }
    }

    async fn transfer(
        &self,
        source: &ReplicaDescriptor<String>,
        targets: &[ReplicaDescriptor<String>],
    ) -> Result<(), TaskError> {
        let source = in_memory(source)?;
        let own = self.membership.pool.segments().iter().any(|segment| {
            source.endpoint == *self.membership.endpoint
                && (segment.base..segment.base + segment.size).contains(&source.address)
        });
        for target in targets {
            let target = in_memory(target)?;
            if target.size != source.size {
                return Err(TaskError::Sizes);
            }
            self.write_to(target, source, own).await?;
            self.counts.bytes.fetch_add(source.size, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies an object to a node, on an idle connection if there is one. If that has broken, a new one shows whether the node can
    /// be reached.
    async fn write_to(
        &self,
        target: &BufferDescriptor<String>,
        source: &BufferDescriptor<String>,
        own: bool,
    ) -> Result<(), TaskError> {
        let mut from = match own {
            true => CopySource::Own(&self.membership.pool),
            false => CopySource::Node(Box::new(self.connect(&source.endpoint).await?)),
        };
        from.verify(span(source))?;
        if let Some(mut to) = self.idle_peers.take(&target.endpoint) {
            match copy_chunks(&mut from, source, &mut to, target).await {
                Ok(()) => {
                    self.idle_peers.put(to);
                    return Ok(());
                }
                Err(error @ TaskError::Source(_)) => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, node = %target.endpoint, "an idle connection has broken");
                }
            }
        }
        let mut to = self.connect(&target.endpoint).await?;
        copy_chunks(&mut from, source, &mut to, target).await?;
        self.idle_peers.put(to);
        Ok(())
    }

    async fn connect(&self, endpoint: &str) -> Result<PeerConnection, PeerConnectError> {
        PeerConnection::open(&self.directory, endpoint, self.membership.master.authentication()).await
    }
}

async fn copy_chunks(
    from: &mut CopySource<'_>,
    source: &BufferDescriptor<String>,
    to: &mut PeerConnection,
    target: &BufferDescriptor<String>,
) -> Result<(), TaskError> {
    let mut chunk = vec![0; usize::try_from(CHUNK.min(source.size)).unwrap_or_default()];
    let mut done = 0;
    while done < source.size {
        let left = usize::try_from(source.size - done).unwrap_or(usize::MAX);
        let piece = match chunk.len() > left {
            true => &mut chunk[..left],
            false => &mut chunk[..],
        };
        from.read(source.address + done, piece).await?;
        to.write(target.address + done, piece).await?;
        done += piece.len() as u64;
    }
    if to.protocol() == moongate_transfer::TransferProtocol::V1 && source.size > 0 {
        // V1 has no write acknowledgement. A read on the same connection completes after the write is applied.
        to.read(target.address + source.size - 1, &mut [0]).await?;
    }
    Ok(())
}

/// Source of a copy: this node's memory, or another node.
enum CopySource<'a> {
    Own(&'a SegmentPool),
    Node(Box<PeerConnection>),
}

impl CopySource<'_> {
    fn verify(&self, span: AddressRange) -> Result<(), DamagedRangeError> {
        match self {
            Self::Own(pool) => pool.verify(span),
            Self::Node(_) => Ok(()),
        }
    }

    async fn read(&mut self, start: u64, into: &mut [u8]) -> Result<(), TaskError> {
        match self {
            Self::Own(pool) => Ok(pool.read(AddressRange { start, size: into.len() as u64 }, into)?),
            Self::Node(connection) => Ok(connection.read(start, into).await?),
        }
    }
}

fn span(buffer: &BufferDescriptor<String>) -> AddressRange {
    AddressRange { start: buffer.address, size: buffer.size }
}

pub(crate) fn in_memory(replica: &ReplicaDescriptor<String>) -> Result<&BufferDescriptor<String>, TaskError> {
    match &replica.medium {
        ReplicaMedium::Memory(buffer) => Ok(buffer),
        _ => Err(TaskError::NotInMemory),
    }
}

/// A failed revocation is only logged, because the master expires unfinished copies.
fn log_revocation(response: Result<Result<(), ErrorCode>, RpcError>) {
    if let Err(error) = response.and_then(|result| Ok(result?)) {
        tracing::debug!(%error, "cannot revoke a copy at the master");
    }
}
