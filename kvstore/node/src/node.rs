//! A node from its start to its end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use mooncake_wire::types::Uuid;
use moongate_master_client::rpc::{self, MasterClient, RpcError, StoreCredentials};
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
use crate::config::NodeConfig;
use crate::descriptor_publisher::{DescriptorPublisher, describe_node};
use crate::disk::{self, DiskWorker, NodeDisk};
use crate::engine_segments::EngineSegments;
use crate::error::NodeStartError;
use crate::heartbeat::{self, HeartbeatState};
use crate::listeners::{NodeHost, NodeListeners};
use crate::membership::{NodeMembership, PROTOCOL};
use crate::memory::{new_identity, open_memory, resolve_identity, uuid};
use crate::scrub::{self, ScrubCounts};
use crate::segment_pool::{MountedSegment, SegmentPool};
use crate::start_retry::StartRetry;
use crate::tasks::{TaskCounts, TaskWorker};
use crate::{catalog_sync, rdma};

/// Segments at most, with those that the REST API mounts.
const MAX_SEGMENTS: usize = 256;
/// Time for the last words to master and metadata server.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(3);

/// What all parts of a node share.
#[derive(Clone)]
pub(crate) struct NodeContext {
    pub(crate) membership: NodeMembership,
    pub(crate) heartbeat: Arc<HeartbeatState>,
    pub(crate) serving: Arc<TransferServer>,
    pub(crate) task_counts: Arc<TaskCounts>,
    pub(crate) scrub_counts: Arc<ScrubCounts>,
    pub(crate) catalog_sync_counts: Arc<CatalogSyncCounts>,
    /// Calls of the REST API that were refused for who made them.
    pub(crate) refused_calls: Arc<AtomicU64>,
    pub(crate) client: KvClient,
    /// The tier on a disk, if there is one.
    pub(crate) disk_worker: Option<DiskWorker>,
    /// Segments of engines that are lent.
    pub(crate) engines: Arc<Mutex<EngineSegments>>,
    publisher: DescriptorPublisher,
    fabric: Option<Arc<RdmaFabric>>,
}

/// A node that serves.
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
/// [`NodeStartError`].
pub async fn start(
    flags: NodeArgs,
    config: NodeConfig,
    supervisor: &Supervisor,
) -> Result<RunningNode, NodeStartError> {
    let tls = open_tls(&flags, &config, supervisor)?;
    let wait = Duration::try_from_secs_f64(flags.max_wait_time).unwrap_or_default();
    let deadline = Instant::now() + wait;
    let lasts = flags.memory != SegmentBackingArg::Process;
    let host = NodeHost::parse(&config.local_hostname);
    let address = match flags.listen {
        Some(address) => address,
        None => host.address().await?,
    };
    let peers = allowed_peers(&flags, address)?;
    let segment = open_memory(&flags, &config, deadline).await?;
    let disk = NodeDisk::open(&flags, &config).await?;
    let (memory, label) = (&flags.memory, &flags.memory_label);
    let place = NodeListeners::open(&host, address, flags.data_port, memory, label, disk.is_some())?;
    let endpoint = host.endpoint(place.handshake.local_addr()?.port());
    let identity = resolve_identity(&segment.ledger, &endpoint, segment.is_restored)?;
    let pool = Arc::new(SegmentPool::default());
    let served = rdma::open(&config, lasts, &segment.region, disk.as_deref().map(NodeDisk::buffer));
    let lent = MountedSegment::new(segment, uuid(identity.segment), identity.base, lasts);
    pool.add(Arc::new(lent.with_rdma(served.segment)));
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
        protocol: if fabric.is_some() { rdma::PROTOCOL } else { PROTOCOL },
        capabilities: capabilities.clone(),
    };
    let presence = describe_node(&config, &host, &place, &membership, fabric.as_deref(), tls.as_ref())?;
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
    let answers = rdma::handshake_handler(Arc::clone(&presence.handshakes), fabric.clone(), &endpoint);
    let limits = HandshakeLimits::default();
    let stop = supervisor.token();
    handshake::listen(place.handshake, answers, peers.clone(), tls.clone(), limits, stop, supervisor);

    presence.publish_until(deadline).await?;
    join(&membership, deadline).await?;
    // Who connects meanwhile waits. What they wrote would not be among what the master was told is whole.
    let target: Arc<dyn serve::TransferTarget> = pool;
    let serving = Arc::new(serve::listen(place.data, target, options, supervisor)?);
    let pulse = Arc::new(HeartbeatState::default());
    let beating = CancellationToken::new();
    let heartbeat = heartbeat::start(&membership, Arc::clone(&pulse), beating.clone(), supervisor)?;
    let client_options = ClientOptions {
        tenant: config.tenant.clone(),
        metadata: config.metadata.clone(),
        rdma_devices: config.devices.clone(),
        authentication,
        ..ClientOptions::default()
    };
    let client = KvClient::new(&config.master, client_options, supervisor)?;
    let keeper = disk.zip(place.disk).map(|(disk, listener)| {
        let peers = (peers.clone(), tls.clone());
        start_disk(disk, listener, &host, &membership, &presence, peers, supervisor)
    });
    let shared = NodeContext {
        disk_worker: keeper.transpose()?,
        membership,
        heartbeat: pulse,
        serving,
        task_counts: Arc::default(),
        scrub_counts: Arc::default(),
        catalog_sync_counts: Arc::default(),
        refused_calls: Arc::default(),
        client,
        engines: Arc::default(),
        publisher: presence,
        fabric,
    };
    shared.start_background(flags.scrub_rate, supervisor);
    let face = HttpAccess { address: place.address, peers: &peers, tls: tls.as_ref() };
    let http = shared.serve_http(&flags, &config, face, supervisor)?;
    tracing::info!(
        name = %shared.membership.endpoint,
        data = %shared.publisher.handshakes.descriptor.load().tcp_data_port,
        %http,
        bytes = config.segment_size,
        %peers,
        "this node lends memory"
    );
    let unmounts = !lasts || flags.on_stop == OnStopAction::Unmount;
    let drain_timeout = flags.drain_timeout;
    Ok(RunningNode { shared, heartbeat, heartbeat_stop: beating, unmounts, drain_timeout, http })
}

impl RunningNode {
    /// Where the REST API is.
    #[must_use]
    pub fn http(&self) -> std::net::SocketAddr {
        self.http
    }

    /// The node's name.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.shared.membership.endpoint
    }

    /// Leaves: takes the memory out of the store unless it is kept, and ends what is in progress.
    pub async fn stop(self) {
        self.heartbeat_stop.cancel();
        if self.unmounts {
            self.unregister().await;
        } else {
            tracing::info!("the memory stays as it is for the next run of this node");
        }
        let cut = self.shared.serving.drain(self.drain_timeout).await;
        if cut > 0 {
            tracing::warn!(connections = cut, limit = ?self.drain_timeout, "transfers were cut: they took too long");
        }
        if let Some(keeper) = &self.shared.disk_worker {
            keeper.shut_down().await;
        }
        // It ends at its next pause.
        self.heartbeat.join().await;
    }

    async fn unregister(&self) {
        let membership = &self.shared.membership;
        let farewell = async {
            if let Some(keeper) = &self.shared.disk_worker
                && let Err(error) = keeper.unmount().await
            {
                tracing::warn!(%error, "the master was not told that this node's disk leaves; it will notice");
            }
            for lent in membership.pool.segments().iter() {
                if let Err(error) = membership.unmount(lent.id).await {
                    tracing::warn!(%error, "the master was not told that this node leaves; it will notice");
                }
            }
            if let Err(error) = self.shared.publisher.directory.unpublish(&membership.endpoint).await {
                tracing::warn!(%error, "what the metadata server knows of this node stays there");
            }
        };
        if tokio::time::timeout(SHUTDOWN_GRACE, farewell).await.is_err() {
            tracing::warn!("master or metadata server do not answer: leaving without telling them");
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
        let (presence, pulse, stop) =
            (self.publisher.clone(), Arc::clone(&self.heartbeat), supervisor.token());
        supervisor.spawn_essential("store-presence", async move {
            stop.run_until_cancelled(presence.run(&pulse)).await;
        });
        catalog_sync::start(self.membership.clone(), Arc::clone(&self.catalog_sync_counts), supervisor);
        scrub::start(
            Arc::clone(&self.membership.pool),
            Arc::clone(&self.scrub_counts),
            scrub_rate,
            supervisor,
        );
    }

    /// Whether the machine has memory for so many bytes beside what is mounted.
    pub(crate) fn check_capacity(&self, size: u64) -> Result<(), String> {
        let pool = &self.membership.pool;
        if pool.segments().len() >= MAX_SEGMENTS {
            return Err(format!("this node has {MAX_SEGMENTS} segments already, which is the limit"));
        }
        let limit = moongate_runtime::memory_limit()
            .ok_or("the memory of this machine cannot be read from /proc/meminfo")?;
        let mounted = pool.bytes();
        if mounted.checked_add(size).is_none_or(|sum| sum > limit) {
            return Err(format!(
                "{size} bytes beside the {mounted} that are mounted exceed the {limit} bytes of memory of this machine or container"
            ));
        }
        Ok(())
    }

    /// Lends a further segment, which ends with the process.
    pub(crate) async fn mount_process_memory(&self, size: u64) -> Result<Uuid, String> {
        self.check_capacity(size)?;
        let wanted = SegmentOptions {
            backing: SegmentBacking::Process,
            label: "more".to_owned(),
            size,
            pages: PageMode::Normal,
            placement: NumaPlacement::default(),
        };
        let opened = SegmentMemory::open(&wanted, |base| new_identity(base, size));
        self.mount_segment(opened.map_err(|error| error.to_string())?).await
    }

    /// Lends a segment that ends with the process.
    pub(crate) async fn mount_segment(&self, segment: SegmentMemory) -> Result<Uuid, String> {
        let identity = segment.ledger.identity();
        let registered = self.fabric.as_ref().map(|fabric| fabric.register(&segment.region)).transpose();
        let registered = registered.map_err(|error| error.to_string())?;
        let lent =
            MountedSegment::new(segment, uuid(identity.segment), identity.base, false).with_rdma(registered);
        let lent = Arc::new(lent);
        if !self.membership.pool.add(Arc::clone(&lent)) {
            return Err("its addresses are those of another segment; try again".to_owned());
        }
        self.publisher.update_descriptor(&self.membership);
        let told = async {
            self.publisher.publish().await.map_err(|error| error.to_string())?;
            self.membership.mount(&lent).await.map_err(|error| error.to_string())
        };
        if let Err(error) = told.await {
            self.membership.pool.remove(lent.id);
            self.publisher.update_descriptor(&self.membership);
            return Err(error);
        }
        Ok(lent.id)
    }

    /// Takes a segment back.
    pub(crate) async fn unmount(&self, id: Uuid) -> Result<(), String> {
        if self.membership.pool.segments().iter().all(|lent| lent.id != id) {
            return Err(format!("this node lends no segment {id}"));
        }
        self.membership.unmount(id).await.map_err(|error| error.to_string())?;
        self.membership.pool.remove(id);
        self.publisher.update_descriptor(&self.membership);
        self.publisher.publish().await.map_err(|error| error.to_string())
    }
}

/// Lets the disk be used: by the master for what it moves there, and by readers.
fn start_disk(
    disk: Arc<NodeDisk>,
    listener: TcpListener,
    host: &NodeHost,
    membership: &NodeMembership,
    presence: &DescriptorPublisher,
    (peers, tls): (AllowedPeers, Option<PeerTls>),
    supervisor: &Supervisor,
) -> Result<DiskWorker, NodeStartError> {
    let endpoint = host.endpoint(listener.local_addr()?.port());
    let own = Arc::clone(&membership.endpoint);
    let readers = disk::DiskReadAccess { peers, authentication: tls.zip(membership.capabilities.clone()) };
    disk::listen(listener, Arc::clone(&disk), own, readers, supervisor);
    let keeper = DiskWorker {
        disk,
        membership: membership.clone(),
        directory: presence.directory.clone(),
        endpoint: endpoint.into(),
        unmounting: CancellationToken::new(),
    };
    keeper.clone().start(supervisor);
    Ok(keeper)
}

/// Waits for the master, and lends it the memory.
async fn join(membership: &NodeMembership, deadline: Instant) -> Result<(), NodeStartError> {
    let mut retry = StartRetry::new(deadline);
    loop {
        let joined = async {
            membership.ready().await?;
            for lent in membership.pool.segments().iter() {
                let is_wanted = membership.announce_inventory(lent).await?;
                membership.mount(lent).await?;
                if is_wanted {
                    membership.offer_inventory(lent).await?;
                }
                membership.report_intact_ranges(lent).await?;
            }
            Ok::<_, RpcError>(())
        };
        match joined.await {
            Ok(()) => return Ok(()),
            Err(source) => {
                let refused = matches!(source, RpcError::Refused(_) | RpcError::UnknownRelease { .. });
                if refused || retry.is_expired() {
                    return Err(NodeStartError::Master {
                        address: membership.master.address().to_owned(),
                        source,
                    });
                }
                retry.pause("the master", &source).await;
            }
        }
    }
}
