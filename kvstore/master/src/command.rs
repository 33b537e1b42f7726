//! Running a master until it is asked to stop.

use std::sync::Arc;

use moongate_runtime::Supervisor;

use crate::faces::{EventsFace, FaceAddresses, FaceError, Faces, FacesOptions, MetadataFace, MetadataPlace};
use crate::flags::{EventOptions, MasterOptions, MetadataOptions};
use crate::journal::MemoryJournal;
use crate::kept::{KeepError, Kept};
use crate::rpc::{self, Rpc, RpcError};
use crate::server::{HaState, Server, Standing};
use crate::{summary, ticker};

/// Events that may wait to be published if nothing is said: some 200 MB.
const MOST_EVENTS: usize = 1 << 20;

/// A master that serves.
#[derive(Debug)]
pub struct RunningMaster {
    server: Arc<Server>,
    rpc: Rpc,
    faces: FaceAddresses,
    kept: Option<Kept>,
}

/// A master cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// RPCs cannot be served.
    #[error(transparent)]
    Rpc(#[from] RpcError),
    /// Something else cannot be served.
    #[error(transparent)]
    Face(#[from] FaceError),
    /// Its state cannot be kept.
    #[error(transparent)]
    Keep(#[from] KeepError),
}

/// Where the rest is served.
pub(crate) fn faces(
    admin: std::net::SocketAddr,
    metadata: Option<MetadataOptions>,
    events: Option<EventOptions>,
) -> FacesOptions {
    let metadata = metadata.map(|it| {
        let place = it.folder.map_or(MetadataPlace::Memory, MetadataPlace::Folder);
        MetadataFace { address: it.address, place, cleanup: it.cleanup }
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
        let queue = it.queue.unwrap_or(MOST_EVENTS);
        Some(EventsFace { bind: it.bind, replay: it.replay, backend: it.backend_id, queue })
    });
    FacesOptions { admin, metadata, events, quotas: None }
}

/// Starts a master. It stops with the supervisor; after that, [`RunningMaster::finish`].
///
/// # Errors
/// [`StartError`].
pub async fn start(options: MasterOptions, supervisor: &Supervisor) -> Result<RunningMaster, StartError> {
    let MasterOptions { server, rpc, report, data, unused, missing, .. } = options;
    let quotas = options.quotas.filter(|_| server.core.multi_tenant).map(Into::into);
    let faces = faces(options.metrics, options.metadata, options.events);
    let mut faces = Faces::new(FacesOptions { quotas, ..faces });
    if !unused.is_empty() {
        tracing::debug!(flags = unused.join(" "), "these change nothing here");
    }
    if !missing.is_empty() {
        tracing::warn!(flags = missing.join(" "), "these ask for something that this master does not do");
    }
    if let Some(tls) = &server.tls {
        tls.keep_current(supervisor);
    }
    let threads = server.threads;
    let (server, kept) = if let Some(data) = data {
        let observe = |journal, beside: &_| faces.observe(journal, beside);
        let (server, kept) = Kept::open(&data, server, supervisor, observe)?;
        (server, Some(kept))
    } else {
        tracing::info!("the state is kept in memory only; --data_dir lets it outlive this process");
        // There is nobody who would read what it keeps.
        let journal = faces.observe(Arc::new(MemoryJournal::new(0)), &Arc::default());
        let server = Arc::new(Server::new(server, journal));
        server.open_rebuild();
        (server, None)
    };
    let rpc = rpc::serve(&server, rpc, threads, supervisor)?;
    let faces = faces.start(&server, supervisor).await?;
    server.standing.store(Arc::new(Standing::alone()));
    ticker::start(&server, supervisor);
    if report {
        summary::start(&server, supervisor);
    }
    tracing::info!(rpc = %rpc.address(), threads, "serving Mooncake clients");
    Ok(RunningMaster { server, rpc, faces, kept })
}

impl RunningMaster {
    /// The server.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Where RPCs are served.
    pub fn rpc_address(&self) -> std::net::SocketAddr {
        self.rpc.address()
    }

    /// Where the rest is served.
    pub fn faces(&self) -> FaceAddresses {
        self.faces
    }

    /// Takes no more calls. Those in progress are answered; the supervisor's shutdown waits for that.
    pub fn stop(&self) {
        let standing = Standing { state: HaState::Stopping, ..Standing::clone(&self.server.standing.load()) };
        self.server.standing.store(Arc::new(standing));
        self.rpc.stop();
    }

    /// Saves what is left to be saved. To be called when nothing is served any more.
    pub fn finish(self) {
        if let Some(kept) = self.kept {
            kept.close();
        }
    }
}
