//! Puts the gateway together, runs it, and takes it down without breaking streams.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::{DiscoveryError, TopologyReader};
use moongate_master_client::admin::{AdminClient, AdminClientOptions as AdminOptions, AdminError};
use moongate_runtime::{
    BindError, ConnectionRejection, DescriptorShares, ListenerHandle, ListenerSocket, Supervisor,
    TlsConfigError, open_file_limit,
};
use moongate_scheduler::Scheduler;
use moongate_telemetry::Tracer;
use tokio_util::sync::CancellationToken;

use crate::config::{DEFAULT_CONNECTIONS, GatewayOptions, ModelFolderError, check_model_folders};
use crate::dispatch::{AbortSender, AdmissionQueue, RedispatchBudget, RequestDispatcher, SchedulerClock};
use crate::error::{ApiError, ApiErrorCode};
use crate::feedback::{DecisionHistory, GatewayMetrics};
use crate::fleet::{FleetReader, UpstreamEndpoint, check_health, poll_loads, probe_suspects, watch_topology};
use crate::ingress::{BodyReader, FleetStatusCache, GatewayContext, admin_router, public_router};
use crate::listener_security::{ListenerSecurity, ListenerSecurityError};
use crate::memory::MemoryBudget;
use crate::predict::{
    CacheHitPredictor, EngineTokenizer, FeedStarter, KvIndex, ModelTokenizers, StoreView, run_feeds,
};

/// Time for streams to take in their final error event before their connections are cut.
const CONNECTION_SHUTDOWN_GRACE: Duration = Duration::from_millis(500);

/// Why the gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayStartError {
    /// An address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A listener cannot be guarded as wanted.
    #[error(transparent)]
    Guard(#[from] ListenerSecurityError),
    /// The engines cannot be found out.
    #[error("discovery: {0}")]
    Discovery(#[from] DiscoveryError),
    /// The client for questions to engines cannot be made.
    #[error("questions to engines: {0}")]
    Health(#[from] reqwest::Error),
    /// The address of the store's master is none.
    #[error("--mooncake-admin: {0}")]
    Store(#[from] AdminError),
    /// TLS with the programs of the store cannot be had.
    #[error(transparent)]
    StoreTls(#[from] TlsConfigError),
    /// An address is unknown after binding.
    #[error("listener: {0}")]
    Listener(#[from] std::io::Error),
    /// A folder of a model cannot be used.
    #[error(transparent)]
    Model(#[from] ModelFolderError),
}

impl GatewayStartError {
    /// Whether a setting, or a file that it names, is wrong: the same start fails again until it is corrected.
    #[must_use]
    pub fn is_invalid_setting(&self) -> bool {
        match self {
            Self::Guard(_) | Self::Store(_) | Self::StoreTls(_) | Self::Model(_) => true,
            Self::Discovery(error) => error.is_invalid_setting(),
            Self::Bind(_) | Self::Health(_) | Self::Listener(_) => false,
        }
    }
}

/// A gateway that serves.
#[derive(Debug)]
pub struct RunningGateway {
    /// Where clients connect.
    pub address: SocketAddr,
    /// Where probes and Prometheus connect.
    pub admin_address: SocketAddr,
    /// The engines, as discovered.
    pub topology: TopologyReader,
    state: Arc<GatewayContext>,
    public: ListenerHandle,
    admin: ListenerHandle,
    supervisor: Supervisor,
    public_drain: CancellationToken,
    admin_drain: CancellationToken,
    drain_delay: Duration,
    drain_deadline: Duration,
}

/// Starts a gateway with tasks of its own under `supervisor`.
///
/// # Errors
/// [`GatewayStartError`] if an address is taken, or a topology source cannot be read.
pub async fn start(
    options: &GatewayOptions,
    traces: Tracer,
    supervisor: &Supervisor,
) -> Result<RunningGateway, GatewayStartError> {
    let guards = ListenerSecurity::load(options)?;
    check_model_folders(options)?;
    let listener = moongate_runtime::bind(options.listen)?;
    let admin_listener = moongate_runtime::bind(options.admin_listen)?;
    let (address, admin_address) = (listener.local_addr()?, admin_listener.local_addr()?);

    for exposure in guards.exposures(options, [address, admin_address]) {
        exposure.log();
    }
    let trust = guards.engine_trust.clone();
    let (gate, tls, admin_tls) = guards.start_reloading(supervisor);
    let discovery = options.engines.discovery_options(&trust);
    let registry = discovery.registry.clone();
    let topology = moongate_discovery::start(discovery, supervisor).await?;
    let shares = descriptor_shares(options);
    let memory = options.memory.shares();
    tracing::info!(
        bodies = memory.bodies,
        prompts = memory.prompts,
        conversations = memory.conversations,
        "memory for requests"
    );
    let limits = options.upstream.endpoint_limits(&trust, shares.upstream);
    let fleet = FleetReader::default();
    let index = KvIndex::new(options.index_pages);
    fleet.refresh(&topology, &limits, &index);
    let suspected = limits.silence.suspected.clone();
    let (of, engines, pages, stop) = (fleet.clone(), topology.clone(), index.clone(), supervisor.token());
    supervisor.spawn_restarted("follow topology", move || {
        watch_topology(of.clone(), engines.clone(), limits.clone(), pages.clone(), stop.clone())
    });
    if let Some(health) = options.upstream.health_limits() {
        let client = trust.http_client().pool_max_idle_per_host(0).build()?;
        let (of, requests, until, stop) = (fleet.clone(), client.clone(), health.clone(), supervisor.token());
        supervisor.spawn_restarted("health checks of suspect engines", move || {
            probe_suspects(of.clone(), requests.clone(), until.clone(), suspected.clone(), stop.clone())
        });
        let (of, stop) = (fleet.clone(), supervisor.token());
        supervisor.spawn_restarted("health checks", move || {
            check_health(of.clone(), client.clone(), health.clone(), stop.clone())
        });
    }

    let metrics = Arc::new(GatewayMetrics::new().with_aliases(options.metric_aliases));
    let models = Arc::new(ModelTokenizers::new(options.model.clone(), memory.conversations));
    let store = match &options.mooncake_admin {
        Some(address) => {
            let tls = options.store_tls.load()?;
            if let Some(tls) = &tls {
                tls.reload_on_change(supervisor);
            }
            let admin = AdminClient::authenticated(address, AdminOptions::default(), tls.as_ref())?;
            Some(StoreView::new(admin, index.clone(), metrics.store.clone()))
        }
        None => None,
    };
    if let Some(store) = &store {
        let (view, stop) = (store.clone(), supervisor.token());
        supervisor.spawn_restarted("watch store nodes", move || view.clone().watch_nodes(stop.clone()));
        let events = options.mooncake_events.is_some();
        let (view, of, stop) = (store.clone(), fleet.clone(), supervisor.token());
        supervisor.spawn_restarted("read the store's keys", move || {
            view.clone().run_scanner(of.clone(), events, stop.clone())
        });
        if let Some(endpoint) = options.mooncake_events.clone() {
            let (view, of, stop) = (store.clone(), fleet.clone(), supervisor.token());
            supervisor.spawn_restarted("follow the store's events", move || {
                view.clone().follow_events(endpoint.clone(), of.clone(), stop.clone())
            });
        }
    }
    let feeds = FeedStarter {
        models: models.clone(),
        metrics: metrics.feeds.clone(),
        supervisor: supervisor.clone(),
    };
    supervisor.spawn_essential("feed the index", run_feeds(feeds, fleet.clone(), supervisor.token()));
    let (pages, stop) = (index.clone(), supervisor.token());
    supervisor.spawn_restarted("sweep the index", move || pages.clone().run_sweeper(stop.clone()));
    let settings = options.scheduler_settings();
    let scheduler = Scheduler::new(options.policy.build(&settings), settings);
    let decisions = Arc::new(DecisionHistory::new(options.kept_decisions));
    let clock = SchedulerClock::start(options.time_scale);
    let room = options.held_requests;
    let desk = AdmissionQueue::new(scheduler, clock, room, decisions.clone(), fleet.clone(), metrics.clone());
    supervisor.spawn_essential("attend to held requests", desk.clone().run(supervisor.token()));
    if !options.upstream.load_interval.is_zero() {
        let client = trust.http_client().build()?;
        let told = desk.clone();
        let reported = move |endpoint: &Arc<UpstreamEndpoint>, load| told.record_load(endpoint, load);
        let (of, every, stop) = (fleet.clone(), options.upstream.load_interval, supervisor.token());
        supervisor.spawn_restarted("poll engines' load", move || {
            poll_loads(of.clone(), client.clone(), every, reported.clone(), stop.clone())
        });
    }
    let engines = EngineTokenizer::new(
        options.tokenize_timeout,
        options.engines.authorization(),
        memory.engine_tokens,
        metrics.tokenize.clone(),
    );
    let body_memory = MemoryBudget::new("--body-memory", memory.bodies);
    let prompt_memory = MemoryBudget::new("--prompt-memory", memory.prompts);
    let refused_connections = metrics.overload.refused_connections();
    let dispatcher = RequestDispatcher {
        fleet,
        topology: topology.clone(),
        admission: desk,
        aborter: Arc::new(AbortSender::new(supervisor.clone(), metrics.clone())),
        metrics: metrics.clone(),
        limits: options.upstream.retry_limits(),
        redispatch_budget: RedispatchBudget::new(options.upstream.redispatch_share),
    };
    let engine_client = trust
        .http_client()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(options.upstream.connect_timeout)
        .timeout(options.upstream.answer_timeout)
        .build()?;
    let state = Arc::new(GatewayContext {
        dispatcher,
        predictor: CacheHitPredictor::new(index.clone(), models, engines, store, prompt_memory.clone()),
        index,
        metrics,
        traces,
        bodies: BodyReader::new(options.listeners.body_limits(&body_memory), body_memory, supervisor.clone()),
        prompt_memory,
        priority_headers: options.tenant_priority_headers(),
        decisions,
        fleet_status: FleetStatusCache::new(options.policy),
        registry,
        registration_token: options.engines.registration_token.clone(),
        access: gate,
        admin_open: options.access.admin_open.clone(),
        inference_paths: options.access.inference_path.clone(),
        cors_origins: options.access.cors_origin.clone(),
        engine_client,
        engine_key: options.engines.authorization(),
        draining: CancellationToken::new(),
        force_close: CancellationToken::new(),
    });

    let (public_drain, admin_drain) = (CancellationToken::new(), CancellationToken::new());
    let refusal = ConnectionRejection { response: connection_refusal(), rejected: refused_connections };
    let serve = |listener, tls, router, connections, drain: &CancellationToken| {
        let limits = options.listeners.limits(connections, refusal.clone());
        moongate_runtime::serve(ListenerSocket { listener, tls }, router, limits, drain.clone(), supervisor)
    };
    let public = serve(listener, tls, public_router(state.clone()), shares.clients, &public_drain);
    let admin = serve(admin_listener, admin_tls, admin_router(state.clone()), shares.admin, &admin_drain);
    tracing::info!(%address, admin = %admin_address, policy = %options.policy, "gateway listens");
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

/// Divides the descriptors that this process may have, so that clients never take those of engines, probes and the admin listener.
fn descriptor_shares(options: &GatewayOptions) -> DescriptorShares {
    let (limit, wanted) = (open_file_limit(), options.listeners.max_connections as usize);
    let shares = DescriptorShares::split(limit, wanted);
    if shares.clients < wanted {
        const TEXT: &str = "the limit of open files (ulimit -n) allows fewer connections from clients than --max-connections";
        let connections = shares.clients;
        // The default suits large gateways; only a configured number is a warning.
        if options.listeners.max_connections == DEFAULT_CONNECTIONS {
            tracing::info!(open_files = limit, max_connections = wanted, connections, "{TEXT}");
        } else {
            tracing::warn!(open_files = limit, max_connections = wanted, connections, "{TEXT}");
        }
    }
    shares
}

/// What a client gets whose connection is one too many: a whole HTTP/1.1 response.
fn connection_refusal() -> Arc<[u8]> {
    let text = "this gateway has as many connections as it may have; try again soon, or raise --max-connections and the limit of open files";
    let body = ApiError::new(ApiErrorCode::GatewayOverloaded, text).json();
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    (head + &body).into_bytes().into()
}

impl RunningGateway {
    /// Whether some request can be served now.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.state.dispatcher.fleet.current().can_serve()
    }

    /// Open client connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.public.connections()
    }

    /// Open connections to engines, and how many of them carry no request.
    #[must_use]
    pub fn engine_connections(&self) -> (usize, usize) {
        let fleet = self.state.dispatcher.fleet.current();
        let pools = fleet.members.iter().map(|member| &member.endpoint.pool);
        pools.fold((0, 0), |(open, idle), pool| (open + pool.open(), idle + pool.idle()))
    }

    /// Requests in flight by the engines' books.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        let fleet = self.state.dispatcher.fleet.current();
        fleet.members.iter().map(|member| member.endpoint.in_flight.count()).sum()
    }

    /// Stops: `/ready` says no; after the delay no connection is accepted; open requests may end until the deadline; then
    /// streams get an error event and connections are closed. Returns how many connections had to be cut.
    pub async fn drain(&self) -> usize {
        self.state.draining.cancel();
        tracing::info!(delay = ?self.drain_delay, deadline = ?self.drain_deadline, "draining");
        tokio::time::sleep(self.drain_delay).await;
        self.public_drain.cancel();
        let mut cut = 0;
        if !self.public.wait_idle(self.drain_deadline).await {
            tracing::warn!(
                connections = self.public.connections(),
                "drain deadline has passed; open streams are ended"
            );
            self.state.force_close.cancel();
            cut = self.public.drain_then_close(CONNECTION_SHUTDOWN_GRACE).await;
        }
        self.admin_drain.cancel();
        self.admin.drain_then_close(CONNECTION_SHUTDOWN_GRACE).await;
        cut
    }

    /// Drains, then ends all tasks of the supervisor.
    pub async fn stop(self) {
        let cut = self.drain().await;
        if cut > 0 {
            tracing::warn!(connections = cut, "connections were cut");
        }
        if let Err(still) = self.supervisor.shutdown(CONNECTION_SHUTDOWN_GRACE * 4).await {
            tracing::warn!(%still, "tasks did not end in time");
        }
    }
}
