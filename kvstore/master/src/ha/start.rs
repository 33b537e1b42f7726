//! Starting a master among others.

use std::sync::Arc;
use std::time::Instant;
use std::{io, thread};

use moongate_master_core::MasterCoreOptions;
use moongate_oplog::OplogOptions;
use moongate_runtime::Supervisor;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

use super::coordinator::{CoordinationError, HaCoordinator};
use super::elector::ElectionTimings;
use super::etcd::EtcdCoordinator;
use super::leadership::LeadershipOptions;
use super::lease_coordinator::{self, LeaseCoordinator};
use super::member_folder::{MemberFolder, MemberFolderError, MemberFolderOptions};
use super::node::{HaNode, HaNodeStatus, HaOptions};
use super::pod_label::PodLabeler;
use super::tls::HaTlsError;
use crate::aux_services::MetadataLocation;
use crate::durable::PersistenceSchedule;
use crate::flags::{DataDirOptions, HaBackend, HaFlags, MasterOptions};
use crate::state::MasterState;

/// Bytes of a file of the log: one is read at a time to send followers what they missed.
const LOG_FILE: u64 = 16 << 20;

/// A master among others, which runs.
#[derive(Debug)]
pub struct RunningHaMaster {
    status: Arc<HaNodeStatus>,
}

/// Why a master does not take part.
#[derive(Debug, thiserror::Error)]
pub enum HaStartError {
    /// The store that masters decide with cannot be used.
    #[error("--ha_backend_connstring: {0}")]
    Backend(#[from] CoordinationError),
    /// Files for TLS cannot be used.
    #[error("--ha_replication_…: {0}")]
    Tls(#[from] HaTlsError),
    /// Its state cannot be kept.
    #[error("the state cannot be kept; --data_dir wants a folder that can be written to")]
    Data(#[from] MemberFolderError),
    /// There is no thread for it.
    #[error("no thread for taking part in elections: {0}")]
    Thread(#[from] io::Error),
}

impl RunningHaMaster {
    /// What others may know of it.
    pub fn status(&self) -> &Arc<HaNodeStatus> {
        &self.status
    }
}

/// Starts a master among others. It stops with the supervisor, and gives the lead back then.
///
/// Elections and replication have a thread of their own: threads that serve callers wait for followers, and nothing that followers
/// need may wait for such a thread. To be called inside a tokio runtime with several threads.
///
/// # Errors
/// [`HaStartError`].
pub async fn start(
    flags: HaFlags,
    options: MasterOptions,
    supervisor: &Supervisor,
) -> Result<RunningHaMaster, HaStartError> {
    let MasterOptions {
        server,
        rpc,
        log_summary: report,
        journal_bytes,
        metrics,
        metadata,
        events,
        ignored_flags: unused,
        unsupported_flags: missing,
        quotas,
        data,
        ..
    } = options;
    if !unused.is_empty() {
        tracing::debug!(flags = unused.join(" "), "these change nothing here");
    }
    if !missing.is_empty() {
        tracing::warn!(flags = missing.join(" "), "these ask for something that this master does not do");
    }
    let mut faces = crate::command::service_options(metrics, metadata, events);
    faces.quotas = quotas.filter(|_| server.core.multi_tenant).map(Into::into);
    if let Some(metadata) = &mut faces.metadata {
        metadata.location = MetadataLocation::State;
    }
    let HaFlags {
        backend,
        address,
        replication_address,
        replication,
        tls,
        lease,
        follower_timeout: patience,
        force_leader: force,
    } = flags;
    let times = ElectionTimings { lease };
    if let Some(files) = &tls {
        // Read again for every connection; what cannot be used is better told now.
        files.client()?;
        files.server()?;
    }
    if let Some(tls) = &server.tls {
        tls.reload_on_change(supervisor);
    }
    let disk = data.as_ref().map(|data| open(data, &server.core)).transpose()?;
    let pace = data.as_ref().map(persistence_schedule).unwrap_or_default();
    let shown = Arc::new(HaNodeStatus::new());
    let runtime = Builder::new_current_thread().enable_all().build()?;
    tracing::info!(address, replication_address, ?backend, "one of several masters");
    let coordinator = match coordinator(backend, times, &runtime, &shown, supervisor).await {
        Ok(coordinator) => coordinator,
        Err(error) => {
            // It must not be waited for here.
            runtime.shutdown_background();
            return Err(error.into());
        }
    };
    let tenure = LeadershipOptions {
        server,
        rpc,
        replication,
        services: faces,
        schedule: pace,
        journal_bytes,
        follower_timeout: patience,
        tls,
        log_summary: report,
    };
    let options = HaOptions { address, replication_address, timings: times, force, leadership: tenure };
    let (ended, has_ended) = oneshot::channel::<()>();
    let participant =
        HaNode::new(options, disk, coordinator, Arc::clone(&shown), supervisor.clone(), Handle::current());
    let elections = supervisor.wrap_essential_thread("elections", move || {
        runtime.block_on(participant.run());
        drop(runtime);
        drop(ended);
    });
    thread::Builder::new().name("ha".to_owned()).spawn(elections)?;
    // The thread is no task, so a task stands for it.
    supervisor.spawn("elections", async move {
        let _ = has_ended.await;
    });
    Ok(RunningHaMaster { status: shown })
}

/// The store that masters decide with. Its connections belong to `runtime`.
async fn coordinator(
    backend: HaBackend,
    times: ElectionTimings,
    runtime: &Runtime,
    shown: &Arc<HaNodeStatus>,
    supervisor: &Supervisor,
) -> Result<Arc<dyn HaCoordinator>, CoordinationError> {
    let (lease, pod) = match backend {
        HaBackend::Etcd { endpoints, cluster, tls } => {
            return Ok(Arc::new(EtcdCoordinator::new(
                &endpoints,
                &cluster,
                tls.as_ref(),
                times.response_timeout() / 2,
            )?));
        }
        HaBackend::Kubernetes { lease, pod } => (lease, pod),
    };
    let config = lease_coordinator::config().await?;
    if let Some(pod) = pod {
        let label = PodLabeler::new(config.clone(), &pod)?;
        supervisor.spawn_essential("pod label", label.run(Arc::clone(shown), supervisor.token()));
    }
    let _on = runtime.enter();
    Ok(Arc::new(LeaseCoordinator::new(config, &lease, times.lease)?))
}

fn persistence_schedule(data: &DataDirOptions) -> PersistenceSchedule {
    PersistenceSchedule { snapshot_every: data.snapshot_every, ..PersistenceSchedule::default() }
}

/// The state that was kept.
fn open(
    data: &DataDirOptions,
    settings: &MasterCoreOptions,
) -> Result<(MemberFolder, MasterState), MemberFolderError> {
    let log =
        OplogOptions { flush_always: data.flush_always, file_bytes: LOG_FILE, ..OplogOptions::default() };
    let (begun, pace) = (Instant::now(), persistence_schedule(data));
    let (disk, state, restored) = MemberFolder::open(
        MemberFolderOptions { folder: data.folder.clone(), log, schedule: pace },
        settings,
    )?;
    tracing::info!(folder = %data.folder.display(), last = state.last_record, took = ?begun.elapsed(), "the state: {restored}");
    Ok((disk, state))
}
