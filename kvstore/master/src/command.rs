//! Running a master until it is asked to stop.

use std::sync::Arc;

use moongate_runtime::Supervisor;

use crate::aux_services::{
    AuxServiceAddresses, AuxServiceError, AuxServices, AuxServicesOptions, KvEventServiceOptions,
    MetadataLocation, MetadataServiceOptions,
};
use crate::flags::{KvEventFlags, MasterOptions, MetadataFlags};
use crate::journal::MemoryJournal;
use crate::persistence::{PersistenceError, StatePersistence};
use crate::rpc::{self, RpcServer, RpcServerError};
use crate::server::{HaState, LeadershipStatus, MasterServer};
use crate::{summary, ticker};

/// Events that may wait to be published if nothing is said: some 200 MB.
const DEFAULT_EVENT_QUEUE: usize = 1 << 20;

/// A master that serves.
#[derive(Debug)]
pub struct RunningMaster {
    server: Arc<MasterServer>,
    rpc: RpcServer,
    services: AuxServiceAddresses,
    persistence: Option<StatePersistence>,
}

/// A master cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum MasterStartError {
    /// RPCs cannot be served.
    #[error(transparent)]
    Rpc(#[from] RpcServerError),
    /// Something else cannot be served.
    #[error(transparent)]
    Service(#[from] AuxServiceError),
    /// Its state cannot be kept.
    #[error(transparent)]
    Persistence(#[from] PersistenceError),
}

/// Where the rest is served.
pub(crate) fn service_options(
    admin: std::net::SocketAddr,
    metadata: Option<MetadataFlags>,
    events: Option<KvEventFlags>,
) -> AuxServicesOptions {
    let metadata = metadata.map(|it| {
        let place = it.folder.map_or(MetadataLocation::Memory, MetadataLocation::Folder);
        MetadataServiceOptions { address: it.address, location: place, cleanup: it.cleanup }
    });
    let events = events.and_then(|it| {
        if it.bind.is_empty() {
            tracing::warn!(
                "KV events are published nowhere: --enable_kv_events needs --kv_events_bind_endpoint"
            );
            return None;
        }
        if !it.legacy || !it.keys {
            tracing::warn!("KV events have all members: --nokv_events_emit_… changes nothing");
        }
        let queue = it.queue.unwrap_or(DEFAULT_EVENT_QUEUE);
        Some(KvEventServiceOptions { bind: it.bind, replay: it.replay, backend: it.backend_id, queue })
    });
    AuxServicesOptions { admin, metadata, events, quotas: None }
}

/// Starts a master. It stops with the supervisor; after that, [`RunningMaster::finish`].
///
/// # Errors
/// [`MasterStartError`].
pub async fn start(
    options: MasterOptions,
    supervisor: &Supervisor,
) -> Result<RunningMaster, MasterStartError> {
    let MasterOptions {
        server,
        rpc,
        log_summary: report,
        data,
        ignored_flags: unused,
        unsupported_flags: missing,
        ..
    } = options;
    let quotas = options.quotas.filter(|_| server.core.multi_tenant).map(Into::into);
    let faces = service_options(options.metrics, options.metadata, options.events);
    let mut faces = AuxServices::new(AuxServicesOptions { quotas, ..faces });
    if !unused.is_empty() {
        tracing::debug!(flags = unused.join(" "), "these change nothing here");
    }
    if !missing.is_empty() {
        tracing::warn!(flags = missing.join(" "), "these ask for something that this master does not do");
    }
    if let Some(tls) = &server.tls {
        tls.reload_on_change(supervisor);
    }
    let threads = server.threads;
    let (server, kept) = if let Some(data) = data {
        let observe = |journal, beside: &_| faces.observe(journal, beside);
        let (server, kept) = StatePersistence::open(&data, server, supervisor, observe)?;
        (server, Some(kept))
    } else {
        tracing::info!("the state is kept in memory only; --data_dir lets it outlive this process");
        // There is nobody who would read what it keeps.
        let journal = faces.observe(Arc::new(MemoryJournal::new(0)), &Arc::default());
        let server = Arc::new(MasterServer::new(server, journal));
        server.open_rebuild();
        (server, None)
    };
    let rpc = rpc::serve(&server, rpc, threads, supervisor)?;
    let faces = faces.start(&server, supervisor).await?;
    server.leadership.store(Arc::new(LeadershipStatus::standalone()));
    ticker::start(&server, supervisor);
    if report {
        summary::start(&server, supervisor);
    }
    tracing::info!(rpc = %rpc.address(), threads, "serving Mooncake clients");
    Ok(RunningMaster { server, rpc, services: faces, persistence: kept })
}

impl RunningMaster {
    /// The server.
    pub fn server(&self) -> &Arc<MasterServer> {
        &self.server
    }

    /// Where RPCs are served.
    pub fn rpc_address(&self) -> std::net::SocketAddr {
        self.rpc.address()
    }

    /// Where the rest is served.
    pub fn service_addresses(&self) -> AuxServiceAddresses {
        self.services
    }

    /// Takes no more calls. Those in progress are answered; the supervisor's shutdown waits for that.
    pub fn stop(&self) {
        let standing = LeadershipStatus {
            state: HaState::Stopping,
            ..LeadershipStatus::clone(&self.server.leadership.load())
        };
        self.server.leadership.store(Arc::new(standing));
        self.rpc.stop();
    }

    /// Saves what is left to be saved. To be called when nothing is served any more.
    pub fn finish(self) {
        if let Some(kept) = self.persistence {
            kept.close();
        }
    }
}
