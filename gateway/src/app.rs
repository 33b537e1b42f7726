//! Puts the gateway together, runs it, and takes it down without breaking streams.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::{DiscoveryError, TopologyReader};
use moongate_kvstore::admin::{Admin, AdminError, Options as AdminOptions};
use moongate_runtime::{BindError, Serving, Socket, Supervisor};
use moongate_scheduler::Scheduler;
use moongate_telemetry::Traces;
use tokio_util::sync::CancellationToken;

use crate::config::GatewayOptions;
use crate::dispatch::{Aborter, Clock, Desk, Dispatcher};
use crate::feedback::{Decisions, Metrics};
use crate::fleet::{Endpoint, FleetReader, check_health, follow, poll_loads};
use crate::guard::{GuardError, Guards};
use crate::ingress::{FleetState, Gateway, admin_router, public_router};
use crate::predict::{EngineTokenizer, Feeds, KvIndex, Models, Predictor, StoreView, follow_feeds};

/// Time for streams to take in their final error event before their connections are cut.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Why the gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A listener cannot be guarded as wanted.
    #[error(transparent)]
    Guard(#[from] GuardError),
    /// The engines cannot be found out.
    #[error("discovery: {0}")]
    Discovery(#[from] DiscoveryError),
    /// The client for questions to engines cannot be made.
    #[error("questions to engines: {0}")]
    Health(#[from] reqwest::Error),
    /// The address of the store's master is none.
    #[error("--mooncake-admin: {0}")]
    Store(#[from] AdminError),
    /// An address is unknown after binding.
    #[error("listener: {0}")]
    Listener(#[from] std::io::Error),
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
    state: Arc<Gateway>,
    public: Serving,
    admin: Serving,
    supervisor: Supervisor,
    public_drain: CancellationToken,
    admin_drain: CancellationToken,
    drain_delay: Duration,
    drain_deadline: Duration,
}

/// Starts a gateway with tasks of its own under `supervisor`.
///
/// # Errors
/// [`StartError`] if an address is taken, or a topology source cannot be read.
pub async fn start(
    options: &GatewayOptions,
    traces: Traces,
    supervisor: &Supervisor,
) -> Result<RunningGateway, StartError> {
    let guards = Guards::load(options)?;
    let listener = moongate_runtime::bind(options.listen)?;
    let admin_listener = moongate_runtime::bind(options.admin_listen)?;
    let (address, admin_address) = (listener.local_addr()?, admin_listener.local_addr()?);

    for exposure in guards.exposures(options, [address, admin_address]) {
        exposure.log();
    }
    let trust = guards.trust.clone();
    let (gate, tls, admin_tls) = guards.keep_current(supervisor);
    let discovery = options.engines.discovery_options(&trust);
    let registry = discovery.registry.clone();
    let topology = moongate_discovery::start(discovery, supervisor).await?;
    let limits = options.upstream.endpoint_limits(&trust);
    let fleet = FleetReader::default();
    let index = KvIndex::new(options.index_pages);
    fleet.refresh(&topology, &limits, &index);
    let following = follow(fleet.clone(), topology.clone(), limits, index.clone(), supervisor.token());
    supervisor.spawn("follow topology", following);
    if let Some(health) = options.upstream.health_limits() {
        let client = trust.http().pool_max_idle_per_host(0).build()?;
        supervisor.spawn("health checks", check_health(fleet.clone(), client, health, supervisor.token()));
    }

    let metrics = Arc::new(Metrics::new().with_aliases(options.metric_aliases));
    let models = Arc::new(Models::new(options.model.clone()));
    let store = match &options.mooncake_admin {
        Some(address) => {
            let admin = Admin::new(address, AdminOptions::default())?;
            Some(StoreView::new(admin, index.clone(), metrics.store.clone()))
        }
        None => None,
    };
    if let Some(store) = &store {
        supervisor.spawn("watch store nodes", store.clone().watch_nodes(supervisor.token()));
        let events = options.mooncake_events.is_some();
        let reading = store.clone().keep_read(fleet.clone(), events, supervisor.token());
        supervisor.spawn("read the store's keys", reading);
        if let Some(endpoint) = options.mooncake_events.clone() {
            let following = store.clone().follow_events(endpoint, fleet.clone(), supervisor.token());
            supervisor.spawn("follow the store's events", following);
        }
    }
    let feeds =
        Feeds { models: models.clone(), metrics: metrics.feeds.clone(), supervisor: supervisor.clone() };
    supervisor.spawn("feed the index", follow_feeds(feeds, fleet.clone(), supervisor.token()));
    supervisor.spawn("sweep the index", index.clone().keep_swept(supervisor.token()));
    let settings = options.scheduler_settings();
    let scheduler = Scheduler::new(options.policy.build(&settings), settings);
    let decisions = Arc::new(Decisions::new(options.kept_decisions));
    let clock = Clock::start(options.time_scale);
    let room = options.held_requests;
    let desk = Desk::new(scheduler, clock, room, decisions.clone(), fleet.clone(), metrics.clone());
    supervisor.spawn("attend to held requests", desk.clone().attend(supervisor.token()));
    if !options.upstream.load_interval.is_zero() {
        let client = trust.http().build()?;
        let told = desk.clone();
        let reported = move |endpoint: &Arc<Endpoint>, load| told.reported(endpoint, load);
        let polling =
            poll_loads(fleet.clone(), client, options.upstream.load_interval, reported, supervisor.token());
        supervisor.spawn("ask engines for their load", polling);
    }
    let engines = EngineTokenizer::new(
        options.tokenize_timeout,
        options.engines.authorization(),
        metrics.tokenize.clone(),
    );
    let dispatcher = Dispatcher {
        fleet,
        topology: topology.clone(),
        desk,
        aborter: Arc::new(Aborter::new(supervisor.clone(), metrics.clone())),
        metrics: metrics.clone(),
        limits: options.upstream.retry_limits(),
    };
    let state = Arc::new(Gateway {
        dispatcher,
        predictor: Predictor::new(index.clone(), models, engines, store),
        index,
        metrics,
        traces,
        body_limits: options.listeners.body_limits(),
        standing: options.standing(),
        decisions,
        fleet_state: FleetState::new(options.policy),
        registry,
        registration_token: options.engines.registration_token.clone(),
        gate,
        admin_open: options.access.admin_open.clone(),
        engine_key: options.engines.authorization(),
        supervisor: supervisor.clone(),
        draining: CancellationToken::new(),
        forced_end: CancellationToken::new(),
    });

    let (public_drain, admin_drain) = (CancellationToken::new(), CancellationToken::new());
    let serve = |listener, tls, router, drain: &CancellationToken| {
        let limits = options.listeners.limits();
        moongate_runtime::serve(Socket { listener, tls }, router, limits, drain.clone(), supervisor)
    };
    let public = serve(listener, tls, public_router(state.clone()), &public_drain);
    let admin = serve(admin_listener, admin_tls, admin_router(state.clone()), &admin_drain);
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
    pub fn booked(&self) -> u32 {
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
            self.state.forced_end.cancel();
            cut = self.public.finish(LAST_WORDS).await;
        }
        self.admin_drain.cancel();
        self.admin.finish(LAST_WORDS).await;
        cut
    }

    /// Drains, then ends all tasks of the supervisor.
    pub async fn stop(self) {
        let cut = self.drain().await;
        if cut > 0 {
            tracing::warn!(connections = cut, "connections were cut");
        }
        if let Err(still) = self.supervisor.shutdown(LAST_WORDS * 4).await {
            tracing::warn!(%still, "tasks did not end in time");
        }
    }
}
