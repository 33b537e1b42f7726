//! Starts a master in HA mode.

use std::sync::Arc;
use std::time::Instant;
use std::{io, thread};

use moongate_master_core::MasterCoreOptions;
use moongate_oplog::OplogOptions;
use moongate_runtime::Supervisor;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

use super::{log_flags, service_options};
use crate::aux_services::MetadataLocation;
use crate::durable::{DataDirOptions, ShardMarkerError, mark_folder};
use crate::flags::{HaBackend, HaFlags, MasterOptions};
use crate::ha::{
    CoordinationError, ElectionTimings, EtcdCoordinator, HaCoordinator, HaNode, HaNodeContext, HaNodeStatus,
    HaOptions, HaTlsError, LeaderTerm, LeadershipOptions, LeaseCoordinator, LeaseReporter, MemberFolder,
    MemberFolderError, MemberFolderOptions, PodLabeler, RestoredFolder, kubernetes_config, release_lease,
};
use crate::state::MasterState;

/// Size of a log file in bytes. A whole file is read to send a follower the records it missed.
const LOG_FILE: u64 = 16 << 20;

/// A running master in HA mode.
#[derive(Debug)]
pub struct RunningHaMaster {
    status: Arc<HaNodeStatus>,
}

/// Errors that prevent a start in HA mode.
#[derive(Debug, thiserror::Error)]
pub enum HaStartError {
    /// The coordinator cannot be used.
    #[error("--ha_backend_connstring: {0}")]
    Backend(#[from] CoordinationError),
    #[error("--ha_replication_…: {0}")]
    Tls(#[from] HaTlsError),
    /// The data directory cannot be used.
    #[error("cannot open the state; --data_dir must be a writable directory")]
    Data(#[from] MemberFolderError),
    #[error(transparent)]
    Shard(#[from] ShardMarkerError),
    /// The HA thread or its runtime could not be started.
    #[error("cannot start the HA thread: {0}")]
    Thread(#[from] io::Error),
}

impl RunningHaMaster {
    /// Status of the master, shared with its tasks.
    pub fn status(&self) -> &Arc<HaNodeStatus> {
        &self.status
    }
}

/// Starts a master in HA mode. It stops with the supervisor and then releases its leadership.
///
/// Elections and replication have their own thread: threads that serve clients block on followers, so nothing that followers depend on
/// may run there. Call this inside a multi-threaded tokio runtime.
///
/// The lease is reported to `lease_reporter`, so that [`release_lease_after_exit`] in another process can release it.
///
/// # Errors
/// [`HaStartError`].
pub async fn start_ha(
    flags: HaFlags,
    options: MasterOptions,
    lease_reporter: LeaseReporter,
    supervisor: &Supervisor,
) -> Result<RunningHaMaster, HaStartError> {
    let MasterOptions {
        server,
        rpc,
        log_summary,
        journal_bytes,
        metrics,
        metadata,
        events,
        ignored_flags,
        unsupported_flags,
        quotas,
        data,
        ..
    } = options;
    log_flags(&ignored_flags, &unsupported_flags);
    let mut services = service_options(metrics, metadata, events);
    services.quotas = quotas.filter(|_| server.core.multi_tenant).map(Into::into);
    if let Some(metadata) = &mut services.metadata {
        metadata.location = MetadataLocation::State;
    }
    let HaFlags {
        backend,
        address,
        replication_address,
        replication,
        tls,
        lease,
        follower_timeout,
        force_leader: force,
    } = flags;
    let timings = ElectionTimings { lease };
    if let Some(files) = &tls {
        // The files are read again for every connection; unusable ones are reported at the start.
        files.client()?;
        files.server()?;
    }
    if let Some(tls) = &server.tls {
        tls.reload_on_change(supervisor);
    }
    data.as_ref().map_or(Ok(()), |data| mark_folder(&data.folder, server.shard))?;
    let disk = data.as_ref().map(|data| open(data, &server.core)).transpose()?;
    let schedule = data.as_ref().map(DataDirOptions::schedule).unwrap_or_default();
    let status = Arc::new(HaNodeStatus::new());
    let runtime = Builder::new_current_thread().enable_all().build()?;
    tracing::info!(address, replication_address, ?backend, "starting in HA mode");
    let coordinator = match coordinator(backend, timings, &runtime, &status, supervisor).await {
        Ok(coordinator) => coordinator,
        Err(error) => {
            // Dropping the runtime would block here.
            runtime.shutdown_background();
            return Err(error.into());
        }
    };
    let leadership = LeadershipOptions {
        server,
        rpc,
        replication,
        services,
        schedule,
        journal_bytes,
        follower_timeout,
        tls,
        log_summary,
    };
    let options = HaOptions { address, replication_address, timings, force, leadership };
    let (ended_sender, ended_receiver) = oneshot::channel::<()>();
    let context = HaNodeContext {
        coordinator,
        status: Arc::clone(&status),
        supervisor: supervisor.clone(),
        lease_reporter,
        blocking_runtime: Handle::current(),
    };
    let node = HaNode::new(options, disk, context);
    let elections = supervisor.wrap_essential_thread("elections", move || {
        runtime.block_on(node.run());
        drop(runtime);
        drop(ended_sender);
    });
    thread::Builder::new().name("ha".to_owned()).spawn(elections)?;
    // The supervisor waits for tasks only, so this task represents the thread.
    supervisor.spawn("elections", async move {
        let _ = ended_receiver.await;
    });
    Ok(RunningHaMaster { status })
}

/// Releases the lease that a master with these flags held when its process died.
///
/// # Errors
/// The coordinator cannot be used.
pub async fn release_lease_after_exit(flags: HaFlags, held: LeaderTerm) -> Result<(), HaStartError> {
    let timings = ElectionTimings { lease: flags.lease };
    let coordinator = coordinator_without_pod(flags.backend, timings).await?;
    match release_lease(&*coordinator, held, timings.lease).await {
        true => tracing::warn!(term = held.term, "the leader's process died; its lease was released"),
        false => tracing::warn!(
            term = held.term,
            "the leader's process died, and its lease was not released in time"
        ),
    }
    Ok(())
}

async fn coordinator_without_pod(
    backend: HaBackend,
    timings: ElectionTimings,
) -> Result<Box<dyn HaCoordinator>, CoordinationError> {
    Ok(match backend {
        HaBackend::Etcd { endpoints, cluster, tls } => {
            let limit = timings.response_timeout() / 2;
            Box::new(EtcdCoordinator::new(&endpoints, &cluster, tls.as_ref(), limit)?)
        }
        HaBackend::Kubernetes { lease, .. } => {
            Box::new(LeaseCoordinator::new(kubernetes_config().await?, &lease, timings.lease)?)
        }
    })
}

/// Creates the coordinator. Its connections belong to `runtime`.
async fn coordinator(
    backend: HaBackend,
    timings: ElectionTimings,
    runtime: &Runtime,
    status: &Arc<HaNodeStatus>,
    supervisor: &Supervisor,
) -> Result<Arc<dyn HaCoordinator>, CoordinationError> {
    let (lease, pod) = match backend {
        HaBackend::Etcd { endpoints, cluster, tls } => {
            return Ok(Arc::new(EtcdCoordinator::new(
                &endpoints,
                &cluster,
                tls.as_ref(),
                timings.response_timeout() / 2,
            )?));
        }
        HaBackend::Kubernetes { lease, pod } => (lease, pod),
    };
    let config = kubernetes_config().await?;
    if let Some(pod) = pod {
        let label = PodLabeler::new(config.clone(), &pod)?;
        supervisor.spawn_essential("pod label", label.run(Arc::clone(status), supervisor.token()));
    }
    let _runtime = runtime.enter();
    Ok(Arc::new(LeaseCoordinator::new(config, &lease, timings.lease)?))
}

/// Opens the data folder and restores the state.
fn open(
    data: &DataDirOptions,
    settings: &MasterCoreOptions,
) -> Result<(MemberFolder, MasterState), MemberFolderError> {
    let log =
        OplogOptions { flush_always: data.flush_always, file_bytes: LOG_FILE, ..OplogOptions::default() };
    let (started, schedule) = (Instant::now(), data.schedule());
    let RestoredFolder { folder: disk, state, report: restored } =
        MemberFolder::open(MemberFolderOptions { folder: data.folder.clone(), log, schedule }, settings)?;
    tracing::info!(folder = %data.folder.display(), last_record = state.last_record, elapsed = ?started.elapsed(), "state restored: {restored}");
    Ok((disk, state))
}
