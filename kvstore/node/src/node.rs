//! Start and shutdown of a node.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use moongate_master_client::rpc::{self, MasterClient, StoreCredentials};
use moongate_rdma::RdmaFabric;
use moongate_runtime::net::TcpListener;
use moongate_runtime::{DedicatedThread, PeerTls, Supervisor};
use moongate_store_client::{KvClient, KvClientOptions};
use moongate_transfer::AllowedPeers;
use moongate_transfer::handshake::{self, HandshakeLimits, HandshakeOptions};
use moongate_transfer::serve::{self, TransferServer, TransferServerOptions};
use moongate_transfer::shared::SharedMemoryServer;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::access::{ApiAccess, allowed_peers, open_tls};
use crate::args::{NodeArgs, OnStopAction, SegmentBackingArg, SharedMemoryArg};
use crate::capabilities::CapabilityChecker;
use crate::config::{NodeConfig, TCP_PROTOCOL};
use crate::descriptor_publisher::{DescriptorPublisher, describe_node};
use crate::disk::{DiskReadAccess, DiskWorker, NodeDisk};
use crate::drain_hooks::DrainHooks;
use crate::error::NodeStartError;
use crate::health::NodeMetrics;
use crate::heartbeat::{self, HeartbeatState};
use crate::http::HttpPorts;
use crate::listeners::{ListenerOptions, NodeHost, NodeListeners};
use crate::membership::NodeMembership;
use crate::memory::{open_memory, resolve_identity, uuid};
use crate::rest::RestApi;
use crate::segment_mounter::SegmentMounter;
use crate::segment_pool::{MountedSegment, SegmentPool};
use crate::tasks::TaskWorker;
use crate::{catalog_sync, drain_hooks, health, rdma, removal, rest, scrub, shared_memory};

/// Time limit for unregistering from master and metadata server.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(3);

/// A running node. Dropping it does not stop the node.
pub struct RunningNode {
    segments: SegmentMounter,
    serving: Arc<TransferServer>,
    disk_worker: Option<DiskWorker>,
    heartbeat: DedicatedThread,
    heartbeat_stop: CancellationToken,
    unmounts: bool,
    drain_timeout: Duration,
    /// `None` if the node serves no HTTP.
    http: Option<SocketAddr>,
    /// Open until the node stops.
    _shared_memory: Option<SharedMemoryServer>,
}

/// Where a node serves HTTP.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HttpService {
    /// REST API, hooks, health and metrics on the node's port.
    Full,
    /// Nothing: the node is part of a process that has its own interface.
    Off,
}

/// Starts a node inside another program, without HTTP servers. It runs until [`RunningNode::stop`].
///
/// # Errors
/// As [`start`].
pub async fn start_without_http(
    flags: NodeArgs,
    config: NodeConfig,
    supervisor: &Supervisor,
) -> Result<RunningNode, NodeStartError> {
    start_node(flags, config, HttpService::Off, supervisor).await
}

/// Starts a node. It runs until [`RunningNode::stop`].
///
/// # Errors
/// [`NodeStartError`], after `--max-wait-time` if master or metadata server are unreachable.
pub async fn start(
    flags: NodeArgs,
    config: NodeConfig,
    supervisor: &Supervisor,
) -> Result<RunningNode, NodeStartError> {
    start_node(flags, config, HttpService::Full, supervisor).await
}

async fn start_node(
    flags: NodeArgs,
    config: NodeConfig,
    http: HttpService,
    supervisor: &Supervisor,
) -> Result<RunningNode, NodeStartError> {
    let wait = Duration::try_from_secs_f64(flags.max_wait_time).unwrap_or_default();
    let deadline = Instant::now() + wait;
    let PreparedNode { tls, peers, host, listeners, disk, fabric, membership } =
        PreparedNode::open(&flags, &config, deadline, supervisor).await?;
    // RDMA writes and capabilities bypass what mapped memory relies on.
    let can_share = tls.is_none() && fabric.is_none();
    let socket = if can_share { &flags.shared_memory } else { &SharedMemoryArg::Off };
    let shared_memory = shared_memory::serve(socket, &membership.pool)?;
    let publisher = describe_node(&config, &host, &listeners, &membership, fabric.as_deref(), tls.as_ref())?;
    publisher.announce_shared_memory(shared_memory.as_ref());
    let options = transfer_options(&flags, &peers, tls.as_ref(), membership.capabilities.clone());
    let endpoint = &membership.endpoint;
    let handler = rdma::handshake_handler(Arc::clone(&publisher.handshakes), fabric.clone(), endpoint);
    let limits = HandshakeLimits::default();
    let handshakes = HandshakeOptions { peers: peers.clone(), tls: tls.clone(), limits };
    handshake::listen(listeners.handshake, handler, handshakes, supervisor);

    publisher.publish_until(deadline).await?;
    membership.join(deadline).await?;
    // Data transfers start only after the intact ranges were reported: later writes would be missing from that report.
    let target: Arc<dyn serve::TransferTarget> = Arc::clone(&membership.pool) as _;
    let serving = Arc::new(serve::listen(listeners.data, target, options, supervisor)?);
    let heartbeat_state = Arc::new(HeartbeatState::default());
    let heartbeat_stop = CancellationToken::new();
    let heartbeat =
        heartbeat::start(&membership, Arc::clone(&heartbeat_state), heartbeat_stop.clone(), supervisor)?;
    let disk_access = DiskReadAccess {
        peers: peers.clone(),
        authentication: tls.clone().zip(membership.capabilities.clone()),
    };
    let start_disk = |(disk, listener): (_, TcpListener)| {
        let endpoint = host.endpoint(listener.local_addr()?.port());
        let worker = DiskWorker::new(disk, membership.clone(), publisher.directory.clone(), &endpoint);
        worker.start(listener, disk_access, supervisor);
        Ok::<_, NodeStartError>(worker)
    };
    let disk_worker = disk.zip(listeners.disk).map(start_disk).transpose()?;
    let metrics = NodeMetrics {
        pool: Arc::clone(&membership.pool),
        heartbeat: heartbeat_state,
        serving: Arc::clone(&serving),
        task_counts: Arc::default(),
        scrub_counts: Arc::default(),
        catalog_sync_counts: Arc::default(),
        refused_calls: Arc::default(),
        disk: disk_worker.as_ref().map(|worker| Arc::clone(&worker.disk)),
    };
    start_background(&membership, &publisher, &metrics, flags.scrub_rate, supervisor);
    let segments = SegmentMounter { membership, publisher, fabric };
    let http = match http {
        HttpService::Off => None,
        HttpService::Full => {
            let authentication = segments.membership.master.authentication().cloned();
            let client = open_client(&config, authentication, supervisor)?;
            let api = RestApi { client, segments: segments.clone(), disk_worker: disk_worker.clone() };
            let ports = HttpPorts { address: listeners.address, tls: tls.as_ref(), supervisor };
            Some(serve_http(api, metrics, &flags, &config, &peers, ports)?)
        }
    };
    tracing::info!(
        name = %segments.membership.endpoint,
        data_port = %segments.publisher.handshakes.descriptor.load().tcp_data_port,
        http = http.map(tracing::field::display),
        bytes = config.segment_size,
        %peers,
        "store node ready"
    );
    let unmounts = flags.memory == SegmentBackingArg::Process || flags.on_stop == OnStopAction::Unmount;
    let drain_timeout = flags.drain_timeout;
    Ok(RunningNode {
        segments,
        serving,
        disk_worker,
        heartbeat,
        heartbeat_stop,
        unmounts,
        drain_timeout,
        http,
        _shared_memory: shared_memory,
    })
}

impl RunningNode {
    /// The bound address of the REST API. `None` if the node serves no HTTP.
    #[must_use]
    pub fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// The node's name, as `host:port`.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.segments.membership.endpoint
    }

    /// Stops the node: unmounts its segments unless they are kept, then drains transfers in progress.
    pub async fn stop(self) {
        self.heartbeat_stop.cancel();
        if self.unmounts {
            self.unregister().await;
        } else {
            tracing::info!("segments are kept for the next run of this node");
        }
        let aborted = self.serving.drain(self.drain_timeout).await;
        if aborted > 0 {
            tracing::warn!(connections = aborted, limit = ?self.drain_timeout, "transfers were aborted: they exceeded --drain-timeout");
        }
        if let Some(worker) = &self.disk_worker {
            worker.shut_down().await;
        }
        self.heartbeat.join().await;
    }

    async fn unregister(&self) {
        let membership = &self.segments.membership;
        let unregister = async {
            if let Some(worker) = &self.disk_worker
                && let Err(error) = worker.unmount().await
            {
                tracing::warn!(%error, "cannot unmount this node's disk at the master; the master will expire it");
            }
            for mounted in membership.pool.segments().iter() {
                if let Err(error) = membership.unmount(mounted.id).await {
                    tracing::warn!(%error, "cannot unmount a segment at the master; the master will expire it");
                }
            }
            if let Err(error) = self.segments.publisher.directory.unpublish(&membership.endpoint).await {
                tracing::warn!(%error, "cannot remove this node's descriptor from the metadata server");
            }
        };
        if tokio::time::timeout(SHUTDOWN_GRACE, unregister).await.is_err() {
            tracing::warn!("stopping without unregistering: master or metadata server do not answer");
        }
    }
}

/// A node with memory and sockets, before it is announced to peers and to the master.
struct PreparedNode {
    tls: Option<PeerTls>,
    peers: AllowedPeers,
    host: NodeHost,
    listeners: NodeListeners,
    disk: Option<Arc<NodeDisk>>,
    fabric: Option<Arc<RdmaFabric>>,
    membership: NodeMembership,
}

impl PreparedNode {
    /// Opens memory, disk and sockets. Waits until the deadline for memory that a previous process still has.
    async fn open(
        flags: &NodeArgs,
        config: &NodeConfig,
        deadline: Instant,
        supervisor: &Supervisor,
    ) -> Result<Self, NodeStartError> {
        let tls = open_tls(flags, config, supervisor)?;
        let is_persistent = flags.memory != SegmentBackingArg::Process;
        let host = NodeHost::parse(&config.local_hostname);
        let address = match flags.listen {
            Some(address) => address,
            None => host.address().await?,
        };
        let peers = allowed_peers(flags, address)?;
        let segment = open_memory(flags, config, deadline).await?;
        let disk = NodeDisk::open(flags, config).await?;
        let (memory, label) = (&flags.memory, &flags.memory_label);
        let listeners = NodeListeners::open(&ListenerOptions {
            host: &host,
            address,
            data_port: flags.data_port,
            backing: memory,
            label,
            has_disk: disk.is_some(),
        })?;
        let endpoint = host.endpoint(listeners.handshake.local_addr()?.port());
        let identity = resolve_identity(&segment.ledger, &endpoint, segment.is_restored)?;
        let pool = Arc::new(SegmentPool::default());
        let served = rdma::open(config, memory, &segment.region, disk.as_deref().map(NodeDisk::buffer));
        let mounted = MountedSegment::new(segment, uuid(identity.segment), identity.base, is_persistent);
        pool.add(Arc::new(mounted.with_rdma(served.segment)));
        if disk.as_ref().is_some_and(|disk| !pool.add_buffer(disk.buffer(), served.buffer)) {
            return Err(io::Error::from(io::ErrorKind::AddrInUse).into());
        }
        let fabric = served.fabric;

        let authentication = tls.clone().map(StoreCredentials::new);
        let capabilities = match tls {
            Some(_) => Some(Arc::new(CapabilityChecker::new(Arc::clone(&pool))?)),
            None => None,
        };
        let options = rpc::MasterClientOptions::default();
        let master = MasterClient::authenticated(&config.master, options, authentication, supervisor);
        let membership = NodeMembership {
            heartbeats_only: false,
            master,
            client_id: uuid(identity.client),
            endpoint: endpoint.as_str().into(),
            host: host.name.as_str().into(),
            pool,
            sockets_persist: matches!(flags.memory, SegmentBackingArg::Holder(_)),
            drain: Arc::default(),
            protocol: if fabric.is_some() { moongate_rdma::PROTOCOL } else { TCP_PROTOCOL },
            capabilities,
        };
        Ok(Self { tls, peers, host, listeners, disk, fabric, membership })
    }
}

/// Limits of the data port, and who may connect to it.
fn transfer_options(
    flags: &NodeArgs,
    peers: &AllowedPeers,
    tls: Option<&PeerTls>,
    capabilities: Option<Arc<CapabilityChecker>>,
) -> TransferServerOptions {
    TransferServerOptions {
        authentication: tls
            .cloned()
            .zip(capabilities)
            .map(|(tls, authorizer)| serve::TransferAuthentication { tls, authorizer }),
        peers: peers.clone(),
        connections: flags.max_connections,
        connections_per_peer: flags.max_connections_per_peer,
        ..TransferServerOptions::default()
    }
}

/// The client of the store for the REST API.
fn open_client(
    config: &NodeConfig,
    authentication: Option<StoreCredentials>,
    supervisor: &Supervisor,
) -> Result<KvClient, NodeStartError> {
    let options = KvClientOptions {
        tenant: config.tenant.clone(),
        metadata: config.metadata.clone(),
        rdma_devices: config.devices.clone(),
        authentication,
        ..KvClientOptions::default()
    };
    Ok(KvClient::new(&config.master, options, supervisor)?)
}

fn start_background(
    membership: &NodeMembership,
    publisher: &DescriptorPublisher,
    metrics: &NodeMetrics,
    scrub_rate: u64,
    supervisor: &Supervisor,
) {
    let worker = TaskWorker {
        membership: membership.clone(),
        directory: publisher.directory.clone(),
        counts: Arc::clone(&metrics.task_counts),
        idle_peers: Arc::default(),
    };
    worker.start(supervisor);
    let (publisher, heartbeat, stop) =
        (publisher.clone(), Arc::clone(&metrics.heartbeat), supervisor.token());
    supervisor.spawn_essential("store-descriptor-publisher", async move {
        stop.run_until_cancelled(publisher.run(&heartbeat)).await;
    });
    catalog_sync::start(membership.clone(), Arc::clone(&metrics.catalog_sync_counts), supervisor);
    let (pool, counts) = (Arc::clone(&membership.pool), Arc::clone(&metrics.scrub_counts));
    scrub::start(pool, counts, scrub_rate, supervisor);
}

/// Serves the REST API, hooks, health and metrics. Returns the address of the REST API.
fn serve_http(
    api: RestApi,
    metrics: NodeMetrics,
    flags: &NodeArgs,
    config: &NodeConfig,
    peers: &AllowedPeers,
    ports: HttpPorts<'_>,
) -> Result<SocketAddr, NodeStartError> {
    let refused = Arc::clone(&metrics.refused_calls);
    let access = ApiAccess::new(peers.clone(), flags.api_token.as_ref(), refused);
    let hooks = DrainHooks {
        membership: api.segments.membership.clone(),
        heartbeat: Arc::clone(&metrics.heartbeat),
        removal: Arc::default(),
        has_disk: api.disk_worker.is_some(),
    };
    removal::start(Arc::clone(&hooks.removal), hooks.membership.clone(), ports.supervisor);
    let health = health::router(metrics);
    if let Some(port) = config.client_http_port {
        ports.serve(port, health.clone())?;
    }
    let hooks = drain_hooks::router(hooks, peers.clone());
    ports.serve(flags.port, rest::router(api, access).merge(hooks).merge(health))
}
