//! What is served beside RPCs: administration and metrics, transfer metadata, KV events.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use mooncake_wire::ErrorCode;
use moongate_runtime::{BindError, ClientCertificate, ListenerLimits, ListenerSocket, PeerTls, Supervisor};
use moongate_zmtp::ZmtpEndpointError;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::events::{
    EventNumberAllocator, KvEventBindError, KvEventPublisher, KvEventPublisherOptions, KvEventQueue,
};
use crate::http::{AdminContext, admin_router};
use crate::journal::Journal;
use crate::metadata::{MetadataStore, MetadataStoreError, metadata_router};
use crate::observer::{FactObserver, ObservingJournal};
use crate::quotas::{QuotaFile, QuotaFileError};
use crate::server::MasterServer;
use crate::state::AuxState;
use crate::summary::MetricsSummary;

/// Bytes of event messages that are kept for who missed them.
const REPLAY_BYTES: usize = 64 << 20;
/// Longest request head: a query may name some thousand keys.
const HEADER_BYTES: usize = 1 << 20;
/// What probes of kubelets request, which have no certificate.
const PROBE_PATHS: [&str; 2] = ["/health", "/role"];
const NO_CERTIFICATE: &str =
    "this needs a client certificate of the store's authority (--store_tls_ca of the master)\n";

/// Where all of it is served.
#[derive(Clone, Debug)]
pub struct AuxServicesOptions {
    /// Administration and metrics.
    pub admin: SocketAddr,
    /// Transfer metadata, if it is to be served.
    pub metadata: Option<MetadataServiceOptions>,
    /// KV events, if they are to be published.
    pub events: Option<KvEventServiceOptions>,
    /// The file that tenants' quotas are kept in, if there is one.
    pub quotas: Option<PathBuf>,
}

/// How transfer metadata is served.
#[derive(Clone, Debug)]
pub struct MetadataServiceOptions {
    /// The address.
    pub address: SocketAddr,
    /// Where entries are kept.
    pub location: MetadataLocation,
    /// Whether the entries of a node are removed when it is gone.
    pub cleanup: bool,
}

/// Where transfer metadata is kept.
#[derive(Clone, Debug)]
pub enum MetadataLocation {
    /// In memory only.
    Memory,
    /// In a folder of its own.
    Folder(PathBuf),
    /// With the master's state, wherever that is.
    State,
}

/// How KV events are published.
#[derive(Clone, Debug)]
pub struct KvEventServiceOptions {
    /// The endpoint for subscribers.
    pub bind: String,
    /// The endpoint for replays, if there is to be one.
    pub replay: Option<String>,
    /// The name of this store in its events.
    pub backend: String,
    /// Events that may wait to be published.
    pub queue: usize,
}

/// Something cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AuxServiceError {
    /// A port cannot be had.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// An endpoint is none.
    #[error("KV events: {0}")]
    Endpoint(#[from] ZmtpEndpointError),
    /// An endpoint cannot be had.
    #[error(transparent)]
    Events(#[from] KvEventBindError),
    /// The metadata's folder cannot be used.
    #[error(transparent)]
    Metadata(#[from] MetadataStoreError),
    /// The file of tenants' quotas cannot be used.
    #[error(transparent)]
    Quotas(#[from] QuotaFileError),
    /// A quota cannot be set.
    #[error("the quota of tenant {0:?} cannot be set: {1}")]
    Quota(String, ErrorCode),
}

/// What has to be there before the server: it sees all that happens from the first fact on.
pub struct AuxServices {
    options: AuxServicesOptions,
    observer: Arc<FactObserver>,
    queue: Option<Arc<KvEventQueue>>,
    expired: Option<mpsc::Receiver<Arc<str>>>,
    /// Where changes go, and what there is of a state beside the state machine.
    persistence: Option<(Arc<dyn Journal>, Arc<AuxState>)>,
}

/// The addresses that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxServiceAddresses {
    /// Administration and metrics.
    pub admin: SocketAddr,
    /// Transfer metadata.
    pub metadata: Option<SocketAddr>,
    /// KV events, for subscribers.
    pub events: Option<SocketAddr>,
    /// KV events, for replays.
    pub replay: Option<SocketAddr>,
}

impl AuxServices {
    /// Nothing is served yet.
    pub fn new(options: AuxServicesOptions) -> Self {
        let queue = options.events.as_ref().map(|events| Arc::new(KvEventQueue::new(events.queue)));
        let mut observer = FactObserver::new(queue.clone());
        let cleanup = options.metadata.as_ref().is_some_and(|metadata| metadata.cleanup);
        let expired = cleanup.then(|| observer.subscribe_expired());
        Self { options, observer: Arc::new(observer), queue, expired, persistence: None }
    }

    /// The journal to give to the server. `beside` is what the server's state has beside the state machine.
    pub fn observe(&mut self, journal: Arc<dyn Journal>, beside: &Arc<AuxState>) -> Arc<dyn Journal> {
        if let Some(queue) = &self.queue {
            queue.begin_after(beside.events());
        }
        self.persistence = Some((Arc::clone(&journal), Arc::clone(beside)));
        Arc::new(ObservingJournal::new(journal, Arc::clone(&self.observer)))
    }

    /// Serves until the supervisor stops. What the server knows already must have been restored.
    ///
    /// # Errors
    /// [`AuxServiceError`].
    pub async fn start(
        self,
        server: &Arc<MasterServer>,
        supervisor: &Supervisor,
    ) -> Result<AuxServiceAddresses, AuxServiceError> {
        let Self { options, observer, queue, expired, persistence: kept } = self;
        let (journal, beside) = kept.unwrap_or_else(|| (Arc::clone(&server.journal), Arc::default()));
        observer.load_segments(&server.master);
        let events = match (options.events, queue) {
            (Some(face), Some(queue)) => {
                let numbers = EventNumberAllocator::new(Arc::clone(&journal), Arc::clone(&beside));
                Some(publish(face, queue, numbers, supervisor).await?)
            }
            _ => None,
        };
        let metadata = match options.metadata {
            Some(face) => {
                let metadata = match &face.location {
                    MetadataLocation::Memory => MetadataStore::in_memory(),
                    MetadataLocation::Folder(folder) => MetadataStore::open(folder)?,
                    MetadataLocation::State => {
                        MetadataStore::in_journal(Arc::clone(&beside.metadata), journal)
                    }
                };
                Some(serve_metadata(face.address, metadata, expired, server.tls.as_ref(), supervisor)?)
            }
            None => None,
        };
        let (events_at, replay) = events
            .as_ref()
            .map(|it| it.local_addresses())
            .map_or((None, None), |(at, replay)| (Some(at), replay));
        let quotas = options.quotas.map(|path| quotas(server, &path, &beside)).transpose()?;
        let summary = Mutex::new(MetricsSummary::new(server));
        let admin = Arc::new(AdminContext { server: Arc::clone(server), observer, events, quotas, summary });
        let admin = serve(options.admin, admin_router(admin), server.tls.as_ref(), supervisor)?;
        tracing::info!(%admin, "serving administration and metrics");
        Ok(AuxServiceAddresses { admin, metadata, events: events_at, replay })
    }
}

/// Serves over TLS to programs with certificates, if `tls` is given.
fn serve(
    address: SocketAddr,
    router: Router,
    tls: Option<&PeerTls>,
    supervisor: &Supervisor,
) -> Result<SocketAddr, BindError> {
    let router = match tls {
        Some(_) => router.layer(from_fn(require_certificate)),
        None => router,
    };
    let listener = moongate_runtime::bind(address)?;
    let local = listener.local_addr().map_err(|source| BindError { address, source })?;
    let limits = ListenerLimits { header_bytes: HEADER_BYTES, ..ListenerLimits::default() };
    let socket = ListenerSocket { listener, tls: tls.map(PeerTls::http_listener) };
    moongate_runtime::serve(socket, router, limits, supervisor.token(), supervisor);
    Ok(local)
}

/// Only the paths of probes are open to clients without a certificate.
async fn require_certificate(request: Request, next: Next) -> Response {
    let is_open = PROBE_PATHS.contains(&request.uri().path());
    if is_open || request.extensions().get::<ClientCertificate>().is_some() {
        return next.run(request).await;
    }
    (StatusCode::FORBIDDEN, NO_CERTIFICATE).into_response()
}

/// Reads the file of quotas. Of several masters only the first leader does; the others write what they know by then.
fn quotas(server: &MasterServer, path: &Path, beside: &AuxState) -> Result<QuotaFile, AuxServiceError> {
    if !beside.had_other_leaders() {
        return set_quotas(server, path);
    }
    let file = QuotaFile::at(path);
    if let Err(error) = file.write(|| server.master.quotas().unwrap_or_default()) {
        tracing::error!(%error, path = %path.display(), "the file of tenants' quotas cannot be written");
    }
    Ok(file)
}

/// Sets the quotas that a file tells.
fn set_quotas(server: &MasterServer, path: &Path) -> Result<QuotaFile, AuxServiceError> {
    let (file, quotas) = QuotaFile::read(path)?;
    let mut recorder = server.recorder();
    for (tenant, bytes) in quotas {
        let set = server.master.set_quota(&tenant, bytes, &mut recorder);
        set.map_err(|code| AuxServiceError::Quota(tenant, code))?;
    }
    // A journal that cannot be written shows with the first call. The file tells the same at the next start.
    if let Err(error) = recorder.commit() {
        tracing::error!(%error, "the journal cannot be written");
    }
    Ok(file)
}

async fn publish(
    face: KvEventServiceOptions,
    queue: Arc<KvEventQueue>,
    numbers: EventNumberAllocator,
    supervisor: &Supervisor,
) -> Result<Arc<KvEventPublisher>, AuxServiceError> {
    let options = KvEventPublisherOptions {
        bind: face.bind.parse()?,
        replay: face.replay.as_deref().map(str::parse).transpose()?,
        backend: face.backend,
        replay_bytes: REPLAY_BYTES,
    };
    let events = KvEventPublisher::start(queue, options, numbers, supervisor).await?;
    tracing::info!(address = %events.local_addresses().0, "publishing KV events");
    Ok(events)
}

fn serve_metadata(
    address: SocketAddr,
    metadata: MetadataStore,
    expired: Option<mpsc::Receiver<Arc<str>>>,
    tls: Option<&PeerTls>,
    supervisor: &Supervisor,
) -> Result<SocketAddr, AuxServiceError> {
    let metadata = Arc::new(metadata);
    if let Some(expired) = expired {
        let (cleaning, stop) = (remove_expired(Arc::clone(&metadata), expired), supervisor.token());
        supervisor.spawn_essential("metadata of nodes that are gone", async move {
            stop.run_until_cancelled(cleaning).await;
        });
    }
    let count = metadata.count();
    let address = serve(address, metadata_router(metadata), tls, supervisor)?;
    tracing::info!(%address, entries = count, "serving transfer metadata");
    Ok(address)
}

async fn remove_expired(metadata: Arc<MetadataStore>, mut expired: mpsc::Receiver<Arc<str>>) {
    while let Some(name) = expired.recv().await {
        let metadata = Arc::clone(&metadata);
        let forgotten = tokio::task::spawn_blocking(move || {
            let entries = metadata.remove_node(&name);
            tracing::info!(node = %name, entries, "forgot the transfer metadata of a node that is gone");
            metadata.commit()
        });
        if let Ok(Err(error)) = forgotten.await {
            tracing::error!(%error, "metadata cannot be kept");
        }
    }
}

impl std::fmt::Debug for AuxServices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faces").field("options", &self.options).finish_non_exhaustive()
    }
}
