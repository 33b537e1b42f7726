//! Start and shutdown of a node, and mounting and unmounting of segments.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use mooncake_wire::types::Uuid;
use moongate_master_client::rpc::{self, MasterClient, StoreCredentials};
use moongate_memory::numa::NumaPlacement;
use moongate_memory::{PageMode, SegmentBacking, SegmentMemory, SegmentOptions};
use moongate_rdma::RdmaFabric;
use moongate_runtime::net::TcpListener;
use moongate_runtime::{DedicatedThread, PeerTls, Supervisor};
use moongate_store_client::{KvClient, KvClientOptions as ClientOptions};
use moongate_transfer::AllowedPeers;
use moongate_transfer::handshake::{self, HandshakeLimits};
use moongate_transfer::serve::{self, TransferServer};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::access::{HttpAccess, allowed_peers, open_tls};
use crate::args::{NodeArgs, OnStopAction, SegmentBackingArg};
use crate::capabilities::CapabilityChecker;
use crate::catalog_sync::CatalogSyncCounts;
use crate::config::{NodeConfig, TCP_PROTOCOL};
use crate::descriptor_publisher::{DescriptorPublisher, describe_node};
use crate::disk::{self, DiskWorker, NodeDisk};
use crate::engine_segments::EngineSegments;
use crate::error::NodeStartError;
use crate::heartbeat::{self, HeartbeatState};
use crate::listeners::{NodeHost, NodeListeners};
use crate::membership::NodeMembership;
use crate::memory::{new_identity, open_memory, resolve_identity, uuid};
use crate::scrub::{self, ScrubCounts};
use crate::segment_pool::{MountedSegment, SegmentPool};
use crate::tasks::{TaskCounts, TaskWorker};
use crate::{catalog_sync, rdma};

/// Time limit for unregistering from master and metadata server.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(3);

/// State that all parts of a node share.
#[derive(Clone)]
pub(crate) struct NodeContext {
    pub(crate) membership: NodeMembership,
    pub(crate) heartbeat: Arc<HeartbeatState>,
    pub(crate) serving: Arc<TransferServer>,
    pub(crate) task_counts: Arc<TaskCounts>,
    pub(crate) scrub_counts: Arc<ScrubCounts>,
    pub(crate) catalog_sync_counts: Arc<CatalogSyncCounts>,
    /// REST API requests that were rejected by access control.
    pub(crate) refused_calls: Arc<AtomicU64>,
    pub(crate) client: KvClient,
    /// Worker of the disk tier, if one is configured.
    pub(crate) disk_worker: Option<DiskWorker>,
    /// Engines' shared memory that is mounted.
    pub(crate) engines: Arc<Mutex<EngineSegments>>,
    publisher: DescriptorPublisher,
    fabric: Option<Arc<RdmaFabric>>,
}

/// A running node. Dropping it does not stop the node.
pub struct RunningNode {
    shared: NodeContext,
    heartbeat: DedicatedThread,
    heartbeat_stop: CancellationToken,
    unmounts: bool,
    drain_timeout: Duration,
    http: std::net::SocketAddr,
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
    let tls = open_tls(&flags, &config, supervisor)?;
    let wait = Duration::try_from_secs_f64(flags.max_wait_time).unwrap_or_default();
    let deadline = Instant::now() + wait;
    let is_persistent = flags.memory != SegmentBackingArg::Process;
    let host = NodeHost::parse(&config.local_hostname);
    let address = match flags.listen {
        Some(address) => address,
        None => host.address().await?,
    };
    let peers = allowed_peers(&flags, address)?;
    let segment = open_memory(&flags, &config, deadline).await?;
    let disk = NodeDisk::open(&flags, &config).await?;
    let (memory, label) = (&flags.memory, &flags.memory_label);
    let listeners = NodeListeners::open(&host, address, flags.data_port, memory, label, disk.is_some())?;
    let endpoint = host.endpoint(listeners.handshake.local_addr()?.port());
    let identity = resolve_identity(&segment.ledger, &endpoint, segment.is_restored)?;
    let pool = Arc::new(SegmentPool::default());
    let served = rdma::open(&config, is_persistent, &segment.region, disk.as_deref().map(NodeDisk::buffer));
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
    let master = MasterClient::authenticated(&config.master, options, authentication.clone(), supervisor);
    let membership = NodeMembership {
        heartbeats_only: false,
        master,
        client_id: uuid(identity.client),
        endpoint: endpoint.as_str().into(),
        host: host.name.as_str().into(),
        pool: Arc::clone(&pool),
        sockets_persist: matches!(flags.memory, SegmentBackingArg::Holder(_)),
        drain: Arc::default(),
        protocol: if fabric.is_some() { moongate_rdma::PROTOCOL } else { TCP_PROTOCOL },
        capabilities: capabilities.clone(),
    };
    let publisher = describe_node(&config, &host, &listeners, &membership, fabric.as_deref(), tls.as_ref())?;
    let options = serve::TransferServerOptions {
        authentication: tls
            .clone()
            .zip(capabilities)
            .map(|(tls, authorizer)| serve::TransferAuthentication { tls, authorizer }),
        peers: peers.clone(),
        connections: flags.max_connections,
        connections_per_peer: flags.max_connections_per_peer,
        ..serve::TransferServerOptions::default()
    };
    let handshake_handler =
        rdma::handshake_handler(Arc::clone(&publisher.handshakes), fabric.clone(), &endpoint);
    let limits = HandshakeLimits::default();
    let stop = supervisor.token();
    handshake::listen(
        listeners.handshake,
        handshake_handler,
        peers.clone(),
        tls.clone(),
        limits,
        stop,
        supervisor,
    );

    publisher.publish_until(deadline).await?;
    membership.join(deadline).await?;
    // Data transfers start only after the intact ranges were reported: later writes would be missing from that report.
    let target: Arc<dyn serve::TransferTarget> = pool;
    let serving = Arc::new(serve::listen(listeners.data, target, options, supervisor)?);
    let heartbeat_state = Arc::new(HeartbeatState::default());
    let heartbeat_stop = CancellationToken::new();
    let heartbeat =
        heartbeat::start(&membership, Arc::clone(&heartbeat_state), heartbeat_stop.clone(), supervisor)?;
    let client_options = ClientOptions {
        tenant: config.tenant.clone(),
        metadata: config.metadata.clone(),
        rdma_devices: config.devices.clone(),
        authentication,
        ..ClientOptions::default()
    };
    let client = KvClient::new(&config.master, client_options, supervisor)?;
    let disk_worker = disk.zip(listeners.disk).map(|(disk, listener)| {
        let peers = (peers.clone(), tls.clone());
        start_disk(disk, listener, &host, &membership, &publisher, peers, supervisor)
    });
    let shared = NodeContext {
        disk_worker: disk_worker.transpose()?,
        membership,
        heartbeat: heartbeat_state,
        serving,
        task_counts: Arc::default(),
        scrub_counts: Arc::default(),
        catalog_sync_counts: Arc::default(),
        refused_calls: Arc::default(),
        client,
        engines: Arc::default(),
        publisher,
        fabric,
    };
    shared.start_background(flags.scrub_rate, supervisor);
    let http_access = HttpAccess { address: listeners.address, peers: &peers, tls: tls.as_ref() };
    let http = shared.serve_http(&flags, &config, http_access, supervisor)?;
    tracing::info!(
        name = %shared.membership.endpoint,
        data_port = %shared.publisher.handshakes.descriptor.load().tcp_data_port,
        %http,
        bytes = config.segment_size,
        %peers,
        "store node ready"
    );
    let unmounts = !is_persistent || flags.on_stop == OnStopAction::Unmount;
    let drain_timeout = flags.drain_timeout;
    Ok(RunningNode { shared, heartbeat, heartbeat_stop, unmounts, drain_timeout, http })
}

impl RunningNode {
    /// The bound address of the REST API.
    #[must_use]
    pub fn http(&self) -> std::net::SocketAddr {
        self.http
    }

    /// The node's name, as `host:port`.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.shared.membership.endpoint
    }

    /// Stops the node: unmounts its segments unless they are kept, then drains transfers in progress.
    pub async fn stop(self) {
        self.heartbeat_stop.cancel();
        if self.unmounts {
            self.unregister().await;
        } else {
            tracing::info!("segments are kept for the next run of this node");
        }
        let aborted = self.shared.serving.drain(self.drain_timeout).await;
        if aborted > 0 {
            tracing::warn!(connections = aborted, limit = ?self.drain_timeout, "transfers were aborted: they exceeded --drain-timeout");
        }
        if let Some(worker) = &self.shared.disk_worker {
            worker.shut_down().await;
        }
        self.heartbeat.join().await;
    }

    async fn unregister(&self) {
        let membership = &self.shared.membership;
        let unregister = async {
            if let Some(worker) = &self.shared.disk_worker
                && let Err(error) = worker.unmount().await
            {
                tracing::warn!(%error, "cannot unmount this node's disk at the master; the master will expire it");
            }
            for mounted in membership.pool.segments().iter() {
                if let Err(error) = membership.unmount(mounted.id).await {
                    tracing::warn!(%error, "cannot unmount a segment at the master; the master will expire it");
                }
            }
            if let Err(error) = self.shared.publisher.directory.unpublish(&membership.endpoint).await {
                tracing::warn!(%error, "cannot remove this node's descriptor from the metadata server");
            }
        };
        if tokio::time::timeout(SHUTDOWN_GRACE, unregister).await.is_err() {
            tracing::warn!("stopping without unregistering: master or metadata server do not answer");
        }
    }
}

impl NodeContext {
    fn start_background(&self, scrub_rate: u64, supervisor: &Supervisor) {
        let worker = TaskWorker {
            membership: self.membership.clone(),
            directory: self.publisher.directory.clone(),
            counts: Arc::clone(&self.task_counts),
        };
        worker.start(supervisor);
        let (publisher, heartbeat, stop) =
            (self.publisher.clone(), Arc::clone(&self.heartbeat), supervisor.token());
        supervisor.spawn_essential("store-descriptor-publisher", async move {
            stop.run_until_cancelled(publisher.run(&heartbeat)).await;
        });
        catalog_sync::start(self.membership.clone(), Arc::clone(&self.catalog_sync_counts), supervisor);
        scrub::start(
            Arc::clone(&self.membership.pool),
            Arc::clone(&self.scrub_counts),
            scrub_rate,
            supervisor,
        );
    }
}

/// Starts the port for disk reads and the worker for the master's disk tasks.
fn start_disk(
    disk: Arc<NodeDisk>,
    listener: TcpListener,
    host: &NodeHost,
    membership: &NodeMembership,
    publisher: &DescriptorPublisher,
    (peers, tls): (AllowedPeers, Option<PeerTls>),
    supervisor: &Supervisor,
) -> Result<DiskWorker, NodeStartError> {
    let endpoint = host.endpoint(listener.local_addr()?.port());
    let own = Arc::clone(&membership.endpoint);
    let access = disk::DiskReadAccess { peers, authentication: tls.zip(membership.capabilities.clone()) };
    disk::listen(listener, Arc::clone(&disk), own, access, supervisor);
    let worker = DiskWorker {
        disk,
        membership: membership.clone(),
        directory: publisher.directory.clone(),
        endpoint: endpoint.into(),
        unmounting: CancellationToken::new(),
    };
    worker.clone().start(supervisor);
    Ok(worker)
}
