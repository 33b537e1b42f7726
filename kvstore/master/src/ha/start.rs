//! Starting a master among others.

use std::sync::Arc;
use std::time::Instant;
use std::{io, thread};

use moongate_kvcore::Settings;
use moongate_oplog::Options;
use moongate_runtime::Supervisor;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

use super::coordinator::{CoordinationError, Coordinator};
use super::disk::{Disk, DiskError, DiskOptions};
use super::elector::Times;
use super::etcd::Etcd;
use super::kubernetes::{self, Kubernetes};
use super::pod_label::PodLabel;
use super::run::{HaOptions, Participant, Shown};
use super::tenure::TenureOptions;
use super::tls::TlsError;
use crate::durable::Pace;
use crate::faces::MetadataPlace;
use crate::flags::{Backend, DataOptions, HaFlags, MasterOptions};
use crate::state::State;

/// Bytes of a file of the log: one is read at a time to send followers what they missed.
const LOG_FILE: u64 = 16 << 20;

/// A master among others, which runs.
#[derive(Debug)]
pub struct HaMaster {
    shown: Arc<Shown>,
}

/// Why a master does not take part.
#[derive(Debug, thiserror::Error)]
pub enum HaStartError {
    /// The store that masters decide with cannot be used.
    #[error("--ha_backend_connstring: {0}")]
    Backend(#[from] CoordinationError),
    /// Files for TLS cannot be used.
    #[error("--ha_replication_…: {0}")]
    Tls(#[from] TlsError),
    /// Its state cannot be kept.
    #[error("the state cannot be kept; --data_dir wants a folder that can be written to")]
    Data(#[from] DiskError),
    /// There is no thread for it.
    #[error("no thread for taking part in elections: {0}")]
    Thread(#[from] io::Error),
}

impl HaMaster {
    /// What others may know of it.
    pub fn shown(&self) -> &Arc<Shown> {
        &self.shown
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
) -> Result<HaMaster, HaStartError> {
    let MasterOptions {
        server,
        rpc,
        report,
        journal_bytes,
        metrics,
        metadata,
        events,
        unused,
        missing,
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
    let mut faces = crate::command::faces(metrics, metadata, events);
    faces.quotas = quotas.filter(|_| server.core.multi_tenant).map(Into::into);
    if let Some(metadata) = &mut faces.metadata {
        metadata.place = MetadataPlace::State;
    }
    let HaFlags { backend, address, replication_address, replication, tls, lease, patience, force } = flags;
    let times = Times { lease };
    if let Some(files) = &tls {
        // Read again for every connection; what cannot be used is better told now.
        files.client()?;
        files.server()?;
    }
    if let Some(tls) = &server.tls {
        tls.keep_current(supervisor);
    }
    let disk = data.as_ref().map(|data| open(data, &server.core)).transpose()?;
    let pace = data.as_ref().map(pace).unwrap_or_default();
    let shown = Arc::new(Shown::new());
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
    let tenure =
        TenureOptions { server, rpc, replication, faces, pace, journal_bytes, patience, tls, report };
    let options = HaOptions { address, replication_address, times, force, tenure };
    let (ended, has_ended) = oneshot::channel::<()>();
    let participant = Participant::new(
        options,
        disk,
        coordinator,
        Arc::clone(&shown),
        supervisor.clone(),
        Handle::current(),
    );
    let elections = supervisor.essential_thread("elections", move || {
        runtime.block_on(participant.run());
        drop(runtime);
        drop(ended);
    });
    thread::Builder::new().name("ha".to_owned()).spawn(elections)?;
    // The thread is no task, so a task stands for it.
    supervisor.spawn("elections", async move {
        let _ = has_ended.await;
    });
    Ok(HaMaster { shown })
}

/// The store that masters decide with. Its connections belong to `runtime`.
async fn coordinator(
    backend: Backend,
    times: Times,
    runtime: &Runtime,
    shown: &Arc<Shown>,
    supervisor: &Supervisor,
) -> Result<Arc<dyn Coordinator>, CoordinationError> {
    let (lease, pod) = match backend {
        Backend::Etcd { endpoints, cluster, tls } => {
            return Ok(Arc::new(Etcd::new(&endpoints, &cluster, tls.as_ref(), times.patience() / 2)?));
        }
        Backend::Kubernetes { lease, pod } => (lease, pod),
    };
    let config = kubernetes::config().await?;
    if let Some(pod) = pod {
        let label = PodLabel::new(config.clone(), &pod)?;
        supervisor.spawn_essential("pod label", label.follow(Arc::clone(shown), supervisor.token()));
    }
    let _on = runtime.enter();
    Ok(Arc::new(Kubernetes::new(config, &lease, times.lease)?))
}

fn pace(data: &DataOptions) -> Pace {
    Pace { snapshot_every: data.snapshot_every, ..Pace::default() }
}

/// The state that was kept.
fn open(data: &DataOptions, settings: &Settings) -> Result<(Disk, State), DiskError> {
    let log = Options { flush_always: data.flush_always, file_bytes: LOG_FILE, ..Options::default() };
    let (begun, pace) = (Instant::now(), pace(data));
    let (disk, state, restored) =
        Disk::open(DiskOptions { folder: data.folder.clone(), log, pace }, settings)?;
    tracing::info!(folder = %data.folder.display(), last = state.last, took = ?begun.elapsed(), "the state: {restored}");
    Ok((disk, state))
}
