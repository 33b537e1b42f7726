//! The services of a master other than RPC: admin interface with metrics, transfer metadata, KV events.

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
    EventNumberAllocator, KvEventBindError, KvEventLabels, KvEventPublisher, KvEventPublisherOptions,
    KvEventQueue,
};
use crate::http::{AdminContext, admin_router};
use crate::journal::Journal;
use crate::metadata::{MetadataStore, MetadataStoreError, metadata_router};
use crate::observer::{FactObserver, ObservingJournal};
use crate::quotas::{QuotaFile, QuotaFileError};
use crate::server::MasterServer;
use crate::state::AuxState;
use crate::summary::MetricsSummary;

/// Size of the replay buffer for KV event messages, in bytes.
const REPLAY_BYTES: usize = 64 << 20;
/// Maximum request head in bytes: a query may contain some thousand keys.
const HEADER_BYTES: usize = 1 << 20;
/// Paths of kubelet probes, which have no client certificate.
const PROBE_PATHS: [&str; 2] = ["/health", "/role"];
const NO_CERTIFICATE: &str = "a client certificate signed by the master's --store_tls_ca is required\n";

/// Addresses and settings of the services.
#[derive(Clone, Debug)]
pub struct AuxServicesOptions {
    /// Listen address of the admin interface, which includes the metrics.
    pub admin: SocketAddr,
    /// Transfer metadata service; `None` disables it.
    pub metadata: Option<MetadataServiceOptions>,
    /// KV event publisher; `None` disables it.
    pub events: Option<KvEventServiceOptions>,
    /// File with the tenants' quotas.
    pub quotas: Option<PathBuf>,
}

/// Settings of the transfer metadata service.
#[derive(Clone, Debug)]
pub struct MetadataServiceOptions {
    /// Listen address of its HTTP server.
    pub address: SocketAddr,
    pub location: MetadataLocation,
    /// Whether to remove the entries of a node that has disconnected.
    pub cleanup: bool,
}

/// Storage of the transfer metadata.
#[derive(Clone, Debug)]
pub enum MetadataLocation {
    Memory,
    /// In a separate folder on disk.
    Folder(PathBuf),
    /// In the master's state, with the same persistence and replication.
    State,
}

/// Settings of the KV event publisher.
#[derive(Clone, Debug)]
pub struct KvEventServiceOptions {
    pub bind: String,
    /// ZeroMQ endpoint for replays; `None` disables them.
    pub replay: Option<String>,
    /// Name of this store in its events.
    pub backend: String,
    /// What is stated in all events.
    pub labels: KvEventLabels,
    /// Maximum number of events that wait to be published.
    pub queue: usize,
}

/// A service could not be started.
#[derive(Debug, thiserror::Error)]
pub enum AuxServiceError {
    /// A port cannot be opened.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A ZeroMQ endpoint cannot be parsed.
    #[error("KV events: {0}")]
    Endpoint(#[from] ZmtpEndpointError),
    /// A ZeroMQ endpoint cannot be bound.
    #[error(transparent)]
    Events(#[from] KvEventBindError),
    /// The folder of the metadata cannot be used.
    #[error(transparent)]
    Metadata(#[from] MetadataStoreError),
    /// The quota file cannot be used.
    #[error(transparent)]
    Quotas(#[from] QuotaFileError),
    /// A quota in the file was rejected.
    #[error("cannot set the quota of tenant {0:?}: {1}")]
    Quota(String, ErrorCode),
}

/// The services before their start. Created before the server, so that they observe its changes from the first record on.
pub struct AuxServices {
    options: AuxServicesOptions,
    observer: Arc<FactObserver>,
    queue: Option<Arc<KvEventQueue>>,
    expired: Option<mpsc::Receiver<Arc<str>>>,
    /// The journal for changes, and the state outside the state machine.
    persistence: Option<(Arc<dyn Journal>, Arc<AuxState>)>,
}

/// Bound addresses of the services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxServiceAddresses {
    /// Admin interface with the metrics.
    pub admin: SocketAddr,
    /// Transfer metadata service, if enabled.
    pub metadata: Option<SocketAddr>,
    /// Endpoint for subscribers of KV events.
    pub events: Option<SocketAddr>,
    /// Endpoint for replays of KV events.
    pub replay: Option<SocketAddr>,
}

impl AuxServices {
    /// Creates the services without opening a port.
    pub fn new(options: AuxServicesOptions) -> Self {
        let queue = options.events.as_ref().map(|events| Arc::new(KvEventQueue::new(events.queue)));
        let mut observer = FactObserver::new(queue.clone());
        let cleanup = options.metadata.as_ref().is_some_and(|metadata| metadata.cleanup);
        let expired = cleanup.then(|| observer.subscribe_expired());
        Self { options, observer: Arc::new(observer), queue, expired, persistence: None }
    }

    /// Wraps the journal for the server. `aux` is the server's state outside the state machine.
    pub fn observe(&mut self, journal: Arc<dyn Journal>, aux: &Arc<AuxState>) -> Arc<dyn Journal> {
        if let Some(queue) = &self.queue {
            queue.begin_after(aux.events());
        }
        self.persistence = Some((Arc::clone(&journal), Arc::clone(aux)));
        Arc::new(ObservingJournal::new(journal, Arc::clone(&self.observer)))
    }

    /// Serves until the supervisor stops. The server's state must have been restored before.
    ///
    /// # Errors
    /// [`AuxServiceError`].
    pub async fn start(
        self,
        server: &Arc<MasterServer>,
        supervisor: &Supervisor,
    ) -> Result<AuxServiceAddresses, AuxServiceError> {
        let Self { options, observer, queue, expired, persistence } = self;
        let (journal, aux) = persistence.unwrap_or_else(|| (Arc::clone(&server.journal), Arc::default()));
        observer.load_segments(&server.master);
        let events = match (options.events, queue) {
            (Some(service), Some(queue)) => {
                let numbers = EventNumberAllocator::new(Arc::clone(&journal), Arc::clone(&aux));
                Some(publish(service, queue, numbers, supervisor).await?)
            }
            _ => None,
        };
        let metadata = match options.metadata {
            Some(service) => {
                let metadata = match &service.location {
                    MetadataLocation::Memory => MetadataStore::in_memory(),
                    MetadataLocation::Folder(folder) => MetadataStore::open(folder)?,
                    MetadataLocation::State => MetadataStore::in_journal(Arc::clone(&aux.metadata), journal),
                };
                Some(serve_metadata(service.address, metadata, expired, server.tls.as_ref(), supervisor)?)
            }
            None => None,
        };
        let (event_address, replay) = events
            .as_ref()
            .map(|publisher| publisher.local_addresses())
            .map_or((None, None), |(address, replay)| (Some(address), replay));
        let quotas = options.quotas.map(|path| quotas(server, &path, &aux)).transpose()?;
        let summary = Mutex::new(MetricsSummary::new(server));
        let admin = Arc::new(AdminContext { server: Arc::clone(server), observer, events, quotas, summary });
        let admin = serve(options.admin, admin_router(admin), server.tls.as_ref(), supervisor)?;
        tracing::info!(%admin, "serving the admin interface and metrics");
        Ok(AuxServiceAddresses { admin, metadata, events: event_address, replay })
    }
}

/// Serves HTTP; with `tls`, only clients with a certificate have access.
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

/// Without a client certificate, only the probe paths are accessible.
async fn require_certificate(request: Request, next: Next) -> Response {
    let is_open = PROBE_PATHS.contains(&request.uri().path());
    if is_open || request.extensions().get::<ClientCertificate>().is_some() {
        return next.run(request).await;
    }
    (StatusCode::FORBIDDEN, NO_CERTIFICATE).into_response()
}

/// Reads the quota file. In HA mode only the first leader does; later leaders overwrite it with the replicated quotas.
fn quotas(server: &MasterServer, path: &Path, aux: &AuxState) -> Result<QuotaFile, AuxServiceError> {
    if !aux.had_other_leaders() {
        return set_quotas(server, path);
    }
    let file = QuotaFile::at(path);
    if let Err(error) = file.write(|| server.master.quotas().unwrap_or_default()) {
        tracing::error!(%error, path = %path.display(), "cannot write the quota file");
    }
    Ok(file)
}

/// Sets the quotas of a file.
fn set_quotas(server: &MasterServer, path: &Path) -> Result<QuotaFile, AuxServiceError> {
    let (file, quotas) = QuotaFile::read(path)?;
    let mut recorder = server.recorder();
    for (tenant, bytes) in quotas {
        let result = server.master.set_quota(&tenant, bytes, &mut recorder);
        result.map_err(|code| AuxServiceError::Quota(tenant, code))?;
    }
    // A failing journal also fails the first call. The next start sets the same quotas again.
    if let Err(error) = recorder.commit() {
        tracing::error!(%error, "cannot write the journal");
    }
    Ok(file)
}

async fn publish(
    service: KvEventServiceOptions,
    queue: Arc<KvEventQueue>,
    numbers: EventNumberAllocator,
    supervisor: &Supervisor,
) -> Result<Arc<KvEventPublisher>, AuxServiceError> {
    let options = KvEventPublisherOptions {
        bind: service.bind.parse()?,
        replay: service.replay.as_deref().map(str::parse).transpose()?,
        backend: service.backend,
        labels: service.labels,
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
        let (cleanup, stop) = (remove_expired(Arc::clone(&metadata), expired), supervisor.token());
        supervisor.spawn_essential("metadata cleanup", async move {
            stop.run_until_cancelled(cleanup).await;
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
        let removal = tokio::task::spawn_blocking(move || {
            let entries = metadata.remove_node(&name);
            tracing::info!(node = %name, entries, "removed the transfer metadata of a disconnected node");
            metadata.commit()
        });
        if let Ok(Err(error)) = removal.await {
            tracing::error!(%error, "cannot save the transfer metadata");
        }
    }
}

impl std::fmt::Debug for AuxServices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuxServices").field("options", &self.options).finish_non_exhaustive()
    }
}
