//! Builds and runs the gateway, and drains it without interrupting streams.

mod running;

use std::sync::Arc;

use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use moongate_batch::{BatchHost, StorageError};
use moongate_discovery::{DiscoveryError, RankLoads};
use moongate_master_client::admin::{AdminClient, AdminClientOptions as AdminOptions, AdminError};
use moongate_runtime::listener::BoxError;
use moongate_runtime::{
    BindError, ClientTls, ConnectionRejection, DescriptorShares, FileChangeWatcher, ListenerSocket,
    Supervisor, TlsConfigError, open_file_limit,
};
use moongate_scheduler::Scheduler;
use moongate_store_shards::InvalidShardCount;
use moongate_telemetry::Tracer;
use tokio_util::sync::CancellationToken;

use crate::config::{
    DEFAULT_CONNECTIONS, GatewayOptions, ModelFolderError, SharedQueueError, check_model_folders,
};
use crate::decide::{
    AdmissionOptions, AdmissionQueue, QueueIdentity, QueuePeers, QueueServer, SchedulerClock, run_election,
};
use crate::dispatch::{AdapterLoader, RequestDispatcher};
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};
use crate::feedback::{DecisionHistory, GatewayMetrics, PromptReportQueue, run_prompt_reports};
use crate::fleet::{FleetReader, UpstreamEndpoint, check_health, poll_loads, probe_suspects, watch_topology};
use crate::ingress::{
    BodyReader, FleetStatusCache, GatewayBackend, GatewayContext, admin_router, public_router,
};
use crate::kv_index::KvIndex;
use crate::legs::{AbortSender, RedispatchBudget};
use crate::listener_security::{ListenerSecurity, ListenerSecurityError};
use crate::lora_adapters::{LoraAdapterFile, LoraAdapterFileError};
use crate::memory::MemoryBudget;
use crate::model_aliases::{ModelAliasFileError, ModelAliases};
use crate::picker::EndpointPicker;
use crate::predict::{
    CacheHitPredictor, EngineTokenizer, FeedStarter, HashedPrefixes, MediaQueryRunner, MediaTokenCache,
    ModelTokenizers, PromptResources, PromptThreads, SeenTexts, StoreAdmins, StoreView, run_feeds,
};
use crate::sessions::SessionRoutes;
use crate::stored_responses::{ResponseOwners, ResponseStore};

pub use running::RunningGateway;

/// Why the gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayStartError {
    /// An address cannot be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// TLS, access or key settings of a listener are invalid.
    #[error(transparent)]
    Guard(#[from] ListenerSecurityError),
    /// Service discovery cannot start.
    #[error("discovery: {0}")]
    Discovery(#[from] DiscoveryError),
    /// The HTTP client for engines cannot be built.
    #[error("HTTP client for engines: {0}")]
    Health(#[from] reqwest::Error),
    /// The address of the master's admin server is invalid.
    #[error("--mooncake-admin: {0}")]
    Store(#[from] AdminError),
    #[error("--mooncake-admin: {0}")]
    StoreShards(#[source] InvalidShardCount),
    #[error(
        "--mooncake-events has {endpoints} endpoints for {masters} masters in --mooncake-admin; give one for each, in the same order"
    )]
    StoreEvents { masters: usize, endpoints: usize },
    /// TLS between store processes is misconfigured.
    #[error(transparent)]
    StoreTls(#[from] TlsConfigError),
    /// The address of a bound listener cannot be read.
    #[error("listener: {0}")]
    Listener(#[from] std::io::Error),
    /// A model folder cannot be used.
    #[error(transparent)]
    Model(#[from] ModelFolderError),
    /// The file of model aliases cannot be used.
    #[error(transparent)]
    ModelAliases(#[from] ModelAliasFileError),
    /// The file of LoRA adapters cannot be used.
    #[error(transparent)]
    LoraAdapters(#[from] LoraAdapterFileError),
    /// The queue cannot be shared.
    #[error(transparent)]
    SharedQueue(#[from] SharedQueueError),
    /// The storage of files and batches cannot be used.
    #[error("--batch-store: {0}")]
    Batches(#[from] StorageError),
}

impl GatewayStartError {
    /// Whether a setting, or a file that it names, is invalid: a restart fails the same way until it is corrected.
    #[must_use]
    pub fn is_invalid_setting(&self) -> bool {
        match self {
            Self::Guard(_)
            | Self::Store(_)
            | Self::StoreShards(_)
            | Self::StoreEvents { .. }
            | Self::StoreTls(_)
            | Self::Model(_)
            | Self::ModelAliases(_)
            | Self::LoraAdapters(_)
            | Self::SharedQueue(_) => true,
            Self::Discovery(error) => error.is_invalid_setting(),
            Self::Bind(_) | Self::Health(_) | Self::Listener(_) | Self::Batches(_) => false,
        }
    }
}

/// Starts a gateway whose tasks run under `supervisor`.
///
/// # Errors
///
/// [`GatewayStartError`] if an address is in use, or a topology source cannot be read.
pub async fn start(
    options: &GatewayOptions,
    traces: Tracer,
    supervisor: &Supervisor,
) -> Result<RunningGateway, GatewayStartError> {
    start_serving(options, traces, supervisor, ("gateway", public_router)).await
}

/// Starts a gateway without its own connections to clients: `service` is at the public listener, and has the gateway pick the engine of
/// each request. Whatever it serves is drained as the gateway's own responses are.
///
/// # Errors
///
/// As [`start`].
pub async fn start_picker<S, B>(
    options: &GatewayOptions,
    traces: Tracer,
    supervisor: &Supervisor,
    service: impl FnOnce(EndpointPicker) -> S,
) -> Result<RunningGateway, GatewayStartError>
where
    S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let service = |gateway| service(EndpointPicker::new(gateway));
    start_serving(options, traces, supervisor, ("endpoint picker", service)).await
}

/// Starts what a gateway consists of, with `service` at its public listener in place of the gateway's own. `name` is for logs.
async fn start_serving<S, B>(
    options: &GatewayOptions,
    traces: Tracer,
    supervisor: &Supervisor,
    (name, service): (&'static str, impl FnOnce(Arc<GatewayContext>) -> S),
) -> Result<RunningGateway, GatewayStartError>
where
    S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let security = ListenerSecurity::load(options)?;
    check_model_folders(options)?;
    let alias_changes = FileChangeWatcher::new(options.model_aliases.files());
    let model_aliases = Arc::new(ModelAliases::load(&options.model_aliases)?);
    let adapter_changes = FileChangeWatcher::new(options.lora_adapters.files());
    let lora_adapters = Arc::new(LoraAdapterFile::load(&options.lora_adapters)?);
    let batches = open_batches(options).await?;
    let listener = moongate_runtime::bind(options.listen)?;
    let admin_listener = moongate_runtime::bind(options.admin_listen)?;
    let (address, admin_address) = (listener.local_addr()?, admin_listener.local_addr()?);

    for exposure in security.exposures(options, [address, admin_address]) {
        exposure.log();
    }
    let trust = security.engine_trust.clone();
    let (access, tls, admin_tls) = security.start_reloading(supervisor);
    let discovery = options.engines.discovery_options(&trust);
    let registry = discovery.registry.clone();
    let topology = moongate_discovery::start(discovery, supervisor).await?;
    let shares = descriptor_shares(options);
    let memory = options.memory.shares();
    tracing::info!(
        bodies = memory.bodies,
        prompts = memory.prompts,
        texts = memory.texts,
        hashes = memory.hashes,
        "memory budgets for requests"
    );
    let limits = options.upstream.endpoint_limits(&trust, shares.upstream);
    let fleet = FleetReader::new(options.engines.version_rule());
    let index = KvIndex::new(options.index_blocks);
    fleet.refresh(&topology, &limits, (&index, &lora_adapters));
    let suspected = limits.silence.suspected.clone();
    let (reader, engines, sources, stop) =
        (fleet.clone(), topology.clone(), (index.clone(), lora_adapters.clone()), supervisor.token());
    supervisor.spawn_restarted("topology", move || {
        watch_topology(reader.clone(), engines.clone(), limits.clone(), sources.clone(), stop.clone())
    });
    if let Some(health) = options.upstream.health_limits() {
        let client = trust.http_client().pool_max_idle_per_host(0).build()?;
        let (reader, requests, check_limits, stop) =
            (fleet.clone(), client, health.clone(), supervisor.token());
        supervisor.spawn_restarted("suspect-health-checks", move || {
            probe_suspects(
                reader.clone(),
                requests.clone(),
                check_limits.clone(),
                suspected.clone(),
                stop.clone(),
            )
        });
        let (reader, stop) = (fleet.clone(), supervisor.token());
        supervisor.spawn_restarted("health-checks", move || {
            check_health(reader.clone(), health.clone(), stop.clone())
        });
    }

    let metrics = Arc::new(GatewayMetrics::new(options.metric_aliases));
    watch_model_aliases(&model_aliases, &metrics, alias_changes, supervisor);
    watch_lora_adapters(&lora_adapters, &metrics, adapter_changes, supervisor);
    let models = Arc::new(ModelTokenizers::new(options.model.clone(), memory.texts));
    let (store, prompt_reports) = match start_store_view(options, supervisor, &metrics, &index, &fleet)? {
        Some((store, prompt_reports)) => (Some(store), Some(prompt_reports)),
        None => (None, None),
    };
    let feeds = FeedStarter {
        models: models.clone(),
        metrics: metrics.feeds.clone(),
        supervisor: supervisor.clone(),
    };
    supervisor.spawn_essential("event-feeds", run_feeds(feeds, fleet.clone(), supervisor.token()));
    let (kv_index, stop) = (index.clone(), supervisor.token());
    supervisor.spawn_restarted("index-sweeper", move || kv_index.clone().run_sweeper(stop.clone()));
    let settings = options.scheduler_settings();
    let scheduler = Scheduler::new(options.policy.build(&settings), settings);
    let decisions = Arc::new(DecisionHistory::new(options.decision_history));
    let clock = SchedulerClock::start(options.time_scale);
    let queue_peers = options.shared_queue.peers(options.policy)?;
    let admission_options = AdmissionOptions {
        capacity: options.max_queued_requests,
        policy: options.policy,
        is_shared: queue_peers.is_some(),
    };
    let admission = AdmissionQueue::new(
        scheduler,
        clock,
        admission_options,
        decisions.clone(),
        fleet.clone(),
        metrics.clone(),
    );
    let queue_server = queue_peers.map(|peers| share_queue(&admission, peers, &metrics, supervisor));
    supervisor.spawn_essential("admission-queue", admission.clone().run(supervisor.token()));
    if !options.upstream.load_interval.is_zero() {
        let authorization = options.engines.authorization();
        let queue = admission.clone();
        let reported =
            move |endpoint: &Arc<UpstreamEndpoint>, loads: &RankLoads| queue.record_load(endpoint, loads);
        let (reader, load_interval, stop) =
            (fleet.clone(), options.upstream.load_interval, supervisor.token());
        supervisor.spawn_restarted("engine-loads", move || {
            poll_loads(reader.clone(), authorization.clone(), load_interval, reported.clone(), stop.clone())
        });
    }
    let engines = Arc::new(EngineTokenizer::new(
        options.tokenize_timeout,
        options.engines.authorization(),
        memory.engine_tokens / 2,
        metrics.tokenize.clone(),
    ));
    let prompt_threads = options.prompt_threads.map_or_else(default_prompt_threads, usize::from);
    let body_memory = MemoryBudget::new("--body-memory", memory.bodies);
    let prompt_memory = MemoryBudget::new("--prompt-memory", memory.prompts);
    let (media, queries) =
        MediaTokenCache::new(memory.engine_tokens / 2, prompt_memory.clone(), metrics.tokenize.clone());
    let runner = MediaQueryRunner {
        cache: media.clone(),
        models: models.clone(),
        engines: engines.clone(),
        metrics: metrics.tokenize.clone(),
    };
    supervisor.spawn_essential("media-queries", runner.run(queries, fleet.clone(), supervisor.token()));
    let rejected_connections = metrics.overload.rejected_connections();
    let adapters = Arc::new(AdapterLoader {
        client: trust.http_client().connect_timeout(options.upstream.connect_timeout).build()?,
        authorization: options.engines.authorization(),
        timeout: options.lora_adapters.lora_load_timeout,
        fleet: fleet.clone(),
        topology: topology.clone(),
        admission: admission.clone(),
        metrics: metrics.adapter_loads.clone(),
        supervisor: supervisor.clone(),
    });
    let dispatcher = RequestDispatcher {
        fleet,
        adapters,
        topology: topology.clone(),
        admission,
        aborter: Arc::new(AbortSender::new(supervisor.clone(), metrics.clone())),
        metrics: metrics.clone(),
        limits: options.upstream.retry_limits(),
        redispatch_budget: RedispatchBudget::new(options.upstream.redispatch_share),
    };
    let engine_client = trust
        .http_client()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(options.upstream.connect_timeout)
        .timeout(options.upstream.response_timeout)
        .build()?;
    let state = Arc::new(GatewayContext {
        dispatcher,
        predictor: CacheHitPredictor::new(
            index.clone(),
            models,
            engines,
            media,
            store,
            PromptResources {
                prefixes: Arc::new(HashedPrefixes::new(memory.hashes)),
                threads: PromptThreads::start(prompt_threads, options.prompt_timeout, supervisor)?,
                memory: prompt_memory.clone(),
                needs_all_blocks: options.policy.needs_all_blocks(),
                seen: Arc::new(SeenTexts::new()),
            },
        ),
        index,
        prompt_reports,
        sessions: SessionRoutes::default(),
        response_owners: ResponseOwners::default(),
        response_store: (options.memory.response_store > 0).then(|| {
            let evicted = metrics.sessions.clone();
            let evicted = move || evicted.record_response("evicted");
            Arc::new(ResponseStore::new(options.memory.response_store, evicted))
        }),
        queue_server,
        metrics,
        traces,
        bodies: BodyReader::new(options.listeners.body_limits(&body_memory), body_memory, supervisor.clone()),
        prompt_memory,
        priority_headers: options.tenant_priority_headers(),
        decisions,
        fleet_status: FleetStatusCache::new(options.policy),
        registry,
        registration_token: options.engines.registration_token.clone(),
        access,
        model_aliases,
        batches,
        admin_open: options.ingress.admin_open.clone(),
        inference_paths: options.ingress.inference_path.clone(),
        cors_origins: options.ingress.cors_origin.clone(),
        engine_client,
        engine_key: options.engines.authorization(),
        draining: CancellationToken::new(),
        force_close: CancellationToken::new(),
    });

    run_batches(&state, supervisor);
    let (public_drain, admin_drain) = (CancellationToken::new(), CancellationToken::new());
    let rejection = ConnectionRejection { response: connection_rejection(), rejected: rejected_connections };
    let limits = |connections| options.listeners.limits(connections, rejection.clone());
    let (socket, admin_socket) =
        (ListenerSocket { listener, tls }, ListenerSocket { listener: admin_listener, tls: admin_tls });
    let public = service(state.clone());
    let public =
        moongate_runtime::serve(socket, public, limits(shares.clients), public_drain.clone(), supervisor);
    let admin = admin_router(state.clone());
    let admin =
        moongate_runtime::serve(admin_socket, admin, limits(shares.admin), admin_drain.clone(), supervisor);
    tracing::info!(%address, admin = %admin_address, policy = %options.policy, "{name} listening");
    Ok(RunningGateway {
        address,
        admin_address,
        topology,
        state,
        public,
        admin,
        supervisor: supervisor.clone(),
        public_drain,
        admin_drain,
        drain_delay: options.drain_delay,
        drain_deadline: options.drain_deadline,
    })
}

/// Half of the processor's cores: the others relay streams.
fn default_prompt_threads() -> usize {
    const MOST: usize = 8;
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).clamp(1, MOST))
}

/// Starts the task that reloads the file of model aliases.
fn watch_model_aliases(
    aliases: &Arc<ModelAliases>,
    metrics: &GatewayMetrics,
    changes: FileChangeWatcher,
    supervisor: &Supervisor,
) {
    let (aliases, metrics, stop) = (aliases.clone(), metrics.model_aliases.clone(), supervisor.token());
    supervisor.spawn_restarted("model-aliases", move || {
        aliases.clone().watch_file(metrics.clone(), changes.clone(), stop.clone())
    });
}

/// Starts the task that reloads the file of LoRA adapters.
fn watch_lora_adapters(
    adapters: &Arc<LoraAdapterFile>,
    metrics: &GatewayMetrics,
    changes: FileChangeWatcher,
    supervisor: &Supervisor,
) {
    let (adapters, metrics, stop) = (adapters.clone(), metrics.adapter_loads.clone(), supervisor.token());
    supervisor.spawn_restarted("lora-adapters", move || {
        let metrics = metrics.clone();
        let reloaded = move |is_valid| metrics.record_reload(is_valid);
        adapters.clone().watch_file(reloaded, changes.clone(), stop.clone())
    });
}

/// Opens the storage of files and batches; `None` without one.
async fn open_batches(options: &GatewayOptions) -> Result<Option<Arc<BatchHost>>, StorageError> {
    let Some(place) = &options.batches.batch_store else { return Ok(None) };
    let limits = options.batches.limits(options.listeners.max_body_bytes);
    Ok(Some(Arc::new(BatchHost::open(place, limits).await?)))
}

/// Starts the task that runs the batches. All of its state is stored, so that it can be restarted.
fn run_batches(state: &Arc<GatewayContext>, supervisor: &Supervisor) {
    let Some(batches) = &state.batches else { return };
    let backend = Arc::new(GatewayBackend { gateway: state.clone(), supervisor: supervisor.clone() });
    let (batches, stop) = (batches.clone(), supervisor.token());
    supervisor.spawn_restarted("batches", move || {
        let (batches, backend, stop) = (batches.clone(), backend.clone(), stop.clone());
        async move { batches.run(&*backend, stop).await }
    });
}

/// Starts the election among the gateways that share a queue. Returns the server for those that follow this one.
fn share_queue(
    admission: &Arc<AdmissionQueue>,
    (peers, tls): (QueuePeers, ClientTls),
    metrics: &GatewayMetrics,
    supervisor: &Supervisor,
) -> QueueServer {
    let stop = supervisor.token();
    supervisor.spawn_restarted("queue-peer-ca", move || tls.clone().reload_on_change(stop.clone()));
    let (own, shared) = (QueueIdentity::new(), metrics.shared_queue.clone());
    let server = QueueServer::new(admission.clone(), own.clone(), shared.clone(), supervisor.clone());
    let election = run_election(admission.clone(), peers, own, shared, supervisor.token());
    supervisor.spawn_essential("shared-queue-election", election);
    server
}

/// Starts the tasks that follow the store's metadata, and the one that sends reports to its master; `None` without a store.
fn start_store_view(
    options: &GatewayOptions,
    supervisor: &Supervisor,
    metrics: &GatewayMetrics,
    index: &Arc<KvIndex>,
    fleet: &FleetReader,
) -> Result<Option<(Arc<StoreView>, PromptReportQueue)>, GatewayStartError> {
    if options.mooncake_admin.is_empty() {
        return Ok(None);
    }
    let (masters, endpoints) = (options.mooncake_admin.len(), options.mooncake_events.len());
    if endpoints > 0 && endpoints != masters {
        return Err(GatewayStartError::StoreEvents { masters, endpoints });
    }
    let tls = options.store_tls.load()?;
    if let Some(tls) = &tls {
        tls.reload_on_change(supervisor);
    }
    let connect =
        |address: &String| AdminClient::authenticated(address, AdminOptions::default(), tls.as_ref());
    let admins = options.mooncake_admin.iter().map(connect).collect::<Result<Vec<_>, _>>()?;
    let store = StoreAdmins::new(admins.clone()).map_err(GatewayStartError::StoreShards)?;
    let store = StoreView::new(store, index.clone(), metrics.store.clone());
    for master in 0..masters {
        let (view, stop) = (store.clone(), supervisor.token());
        supervisor.spawn_restarted("store-nodes", move || view.clone().watch_nodes(master, stop.clone()));
    }
    let (view, reader, stop) = (store.clone(), fleet.clone(), supervisor.token());
    supervisor.spawn_restarted("store-scan", move || {
        view.clone().run_scanner(reader.clone(), endpoints > 0, stop.clone())
    });
    for (master, endpoint) in options.mooncake_events.iter().cloned().enumerate() {
        let (view, reader, stop) = (store.clone(), fleet.clone(), supervisor.token());
        supervisor.spawn_restarted("store-events", move || {
            view.clone().follow_events(master, endpoint.clone(), reader.clone(), stop.clone())
        });
    }
    let (queue, finished) = PromptReportQueue::new(metrics.prompt_reports.clone());
    let reports = run_prompt_reports(admins, metrics.prompt_reports.clone(), finished, supervisor.token());
    supervisor.spawn_essential("prompt-reports", reports);
    Ok(Some((store, queue)))
}

/// Divides the process's file descriptors so that client connections cannot exhaust those of engines, probes and the admin
/// listener.
fn descriptor_shares(options: &GatewayOptions) -> DescriptorShares {
    let (limit, wanted) = (open_file_limit(), options.listeners.max_connections as usize);
    let shares = DescriptorShares::split(limit, wanted);
    if shares.clients < wanted {
        const TEXT: &str =
            "the limit of open files (ulimit -n) allows fewer client connections than --max-connections";
        let connections = shares.clients;
        // The default suits large gateways; only an explicitly configured number deserves a warning.
        if options.listeners.max_connections == DEFAULT_CONNECTIONS {
            tracing::info!(open_files = limit, max_connections = wanted, connections, "{TEXT}");
        } else {
            tracing::warn!(open_files = limit, max_connections = wanted, connections, "{TEXT}");
        }
    }
    shares
}

/// Complete HTTP/1.1 response for connections above the limit.
fn connection_rejection() -> Arc<[u8]> {
    let text = "this gateway has reached its connection limit; retry soon, or raise --max-connections and the limit of open files";
    let body = ApiError::new(ApiErrorCode::GatewayOverloaded, text).json(ErrorFormat::OpenAi);
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    (head + &body).into_bytes().into()
}
