//! A node from its start to its end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use mooncake_wire::types::Uuid;
use moongate_kvclient::{Client, Options as ClientOptions};
use moongate_kvstore::rpc::{self, Authentication, Master, RpcError};
use moongate_memory::numa::Placement;
use moongate_memory::{Keep, Pages, Segment, Wanted};
use moongate_rdma::Fabric;
use moongate_runtime::net::TcpListener;
use moongate_runtime::{OwnThread, PeerTls, Supervisor};
use moongate_transfer::Peers;
use moongate_transfer::handshake::{self, HandshakeLimits};
use moongate_transfer::serve::{self, Serving};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::access::{HttpFace, allowed_peers, open_tls};
use crate::capabilities::CapabilityChecker;
use crate::catalog_sync::CatalogCounts;
use crate::config::Config;
use crate::disk::{self, Disk, Keeper};
use crate::engines::Engines;
use crate::error::StartError;
use crate::flags::{Flags, Keeping, OnStop};
use crate::heartbeat::{self, Pulse};
use crate::membership::{Membership, PROTOCOL};
use crate::memory::{new_identity, open_memory, settle, uuid};
use crate::place::{Host, Place};
use crate::pool::{Lent, Pool};
use crate::presence::{Presence, present};
use crate::scrub::{self, ScrubCounts};
use crate::start_retry::StartRetry;
use crate::tasks::{TaskCounts, Worker};
use crate::{catalog_sync, rdma};

/// Segments at most, with those that the REST API mounts.
const MAX_SEGMENTS: usize = 256;
/// Time for the last words to master and metadata server.
const FAREWELL: Duration = Duration::from_secs(3);

/// What all parts of a node share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) membership: Membership,
    pub(crate) pulse: Arc<Pulse>,
    pub(crate) serving: Arc<Serving>,
    pub(crate) tasks: Arc<TaskCounts>,
    pub(crate) scrubbed: Arc<ScrubCounts>,
    pub(crate) cataloged: Arc<CatalogCounts>,
    /// Calls of the REST API that were refused for who made them.
    pub(crate) refused_calls: Arc<AtomicU64>,
    pub(crate) client: Client,
    /// The tier on a disk, if there is one.
    pub(crate) keeper: Option<Keeper>,
    /// Segments of engines that are lent.
    pub(crate) engines: Arc<Mutex<Engines>>,
    presence: Presence,
    fabric: Option<Arc<Fabric>>,
}

/// A node that serves.
pub struct RunningStore {
    shared: Shared,
    heartbeat: OwnThread,
    beating: CancellationToken,
    unmounts: bool,
    drain_timeout: Duration,
    http: std::net::SocketAddr,
}

/// Starts a node. It runs until [`RunningStore::stop`].
///
/// # Errors
/// [`StartError`].
pub async fn start(
    flags: Flags,
    config: Config,
    supervisor: &Supervisor,
) -> Result<RunningStore, StartError> {
    let tls = open_tls(&flags, &config, supervisor)?;
    let wait = Duration::try_from_secs_f64(flags.max_wait_time).unwrap_or_default();
    let deadline = Instant::now() + wait;
    let lasts = flags.memory != Keeping::Process;
    let host = Host::parse(&config.local_hostname);
    let address = match flags.listen {
        Some(address) => address,
        None => host.address().await?,
    };
    let peers = allowed_peers(&flags, address)?;
    let segment = open_memory(&flags, &config, deadline).await?;
    let disk = Disk::open(&flags, &config).await?;
    let (memory, label) = (&flags.memory, &flags.memory_label);
    let place = Place::open(&host, address, flags.data_port, memory, label, disk.is_some())?;
    let endpoint = host.endpoint(place.handshake.local_addr()?.port());
    let identity = settle(&segment.ledger, &endpoint, segment.kept)?;
    let pool = Arc::new(Pool::default());
    let served = rdma::open(&config, lasts, &segment.region, disk.as_deref().map(Disk::buffer));
    let lent = Lent::new(segment, uuid(identity.segment), identity.base, lasts);
    pool.add(Arc::new(lent.over(served.segment)));
    if disk.as_ref().is_some_and(|disk| !pool.add_buffer(disk.buffer(), served.buffer)) {
        return Err(io::Error::from(io::ErrorKind::AddrInUse).into());
    }
    let fabric = served.fabric;

    let authentication = tls.clone().map(Authentication::new);
    let capabilities = match tls {
        Some(_) => Some(Arc::new(CapabilityChecker::new(Arc::clone(&pool))?)),
        None => None,
    };
    let options = rpc::Options::default();
    let master = Master::authenticated(&config.master, options, authentication.clone(), supervisor);
    let membership = Membership {
        heartbeats_only: false,
        master,
        client_id: uuid(identity.client),
        endpoint: endpoint.as_str().into(),
        host: host.name.as_str().into(),
        pool: Arc::clone(&pool),
        sockets_last: matches!(flags.memory, Keeping::Holder(_)),
        drained: Arc::default(),
        protocol: if fabric.is_some() { rdma::PROTOCOL } else { PROTOCOL },
        capabilities: capabilities.clone(),
    };
    let presence = present(&config, &host, &place, &membership, fabric.as_deref(), tls.as_ref())?;
    let options = serve::Options {
        authentication: tls
            .clone()
            .zip(capabilities)
            .map(|(tls, authorizer)| serve::Authentication { tls, authorizer }),
        peers: peers.clone(),
        connections: flags.max_connections,
        connections_per_peer: flags.max_connections_per_peer,
        ..serve::Options::default()
    };
    let answers = rdma::answers(Arc::clone(&presence.answers), fabric.clone(), &endpoint);
    let limits = HandshakeLimits::default();
    let stop = supervisor.token();
    handshake::listen(place.handshake, answers, peers.clone(), tls.clone(), limits, stop, supervisor);

    presence.enter(deadline).await?;
    join(&membership, deadline).await?;
    // Who connects meanwhile waits. What they wrote would not be among what the master was told is whole.
    let target: Arc<dyn serve::Target> = pool;
    let serving = Arc::new(serve::listen(place.data, target, options, supervisor)?);
    let pulse = Arc::new(Pulse::default());
    let beating = CancellationToken::new();
    let heartbeat = heartbeat::start(&membership, Arc::clone(&pulse), beating.clone(), supervisor)?;
    let client_options = ClientOptions {
        tenant: config.tenant.clone(),
        metadata: config.metadata.clone(),
        rdma_devices: config.devices.clone(),
        authentication,
        ..ClientOptions::default()
    };
    let client = Client::new(&config.master, client_options, supervisor)?;
    let keeper = disk.zip(place.disk).map(|(disk, listener)| {
        let peers = (peers.clone(), tls.clone());
        start_disk(disk, listener, &host, &membership, &presence, peers, supervisor)
    });
    let shared = Shared {
        keeper: keeper.transpose()?,
        membership,
        pulse,
        serving,
        tasks: Arc::default(),
        scrubbed: Arc::default(),
        cataloged: Arc::default(),
        refused_calls: Arc::default(),
        client,
        engines: Arc::default(),
        presence,
        fabric,
    };
    shared.start_background(flags.scrub_rate, supervisor);
    let face = HttpFace { address: place.address, peers: &peers, tls: tls.as_ref() };
    let http = shared.serve_http(&flags, &config, face, supervisor)?;
    tracing::info!(
        name = %shared.membership.endpoint,
        data = %shared.presence.answers.descriptor.load().tcp_data_port,
        %http,
        bytes = config.segment_size,
        %peers,
        "this node lends memory"
    );
    let unmounts = !lasts || flags.on_stop == OnStop::Unmount;
    let drain_timeout = flags.drain_timeout;
    Ok(RunningStore { shared, heartbeat, beating, unmounts, drain_timeout, http })
}

impl RunningStore {
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
        self.beating.cancel();
        if self.unmounts {
            self.leave().await;
        } else {
            tracing::info!("the memory stays as it is for the next run of this node");
        }
        let cut = self.shared.serving.drain(self.drain_timeout).await;
        if cut > 0 {
            tracing::warn!(connections = cut, limit = ?self.drain_timeout, "transfers were cut: they took too long");
        }
        if let Some(keeper) = &self.shared.keeper {
            keeper.end().await;
        }
        // It ends at its next pause.
        self.heartbeat.ended().await;
    }

    async fn leave(&self) {
        let membership = &self.shared.membership;
        let farewell = async {
            if let Some(keeper) = &self.shared.keeper
                && let Err(error) = keeper.leave().await
            {
                tracing::warn!(%error, "the master was not told that this node's disk leaves; it will notice");
            }
            for lent in membership.pool.lent().iter() {
                if let Err(error) = membership.unmount(lent.id).await {
                    tracing::warn!(%error, "the master was not told that this node leaves; it will notice");
                }
            }
            if let Err(error) = self.shared.presence.directory.withdraw(&membership.endpoint).await {
                tracing::warn!(%error, "what the metadata server knows of this node stays there");
            }
        };
        if tokio::time::timeout(FAREWELL, farewell).await.is_err() {
            tracing::warn!("master or metadata server do not answer: leaving without telling them");
        }
    }
}

impl Shared {
    fn start_background(&self, scrub_rate: u64, supervisor: &Supervisor) {
        let worker = Worker {
            membership: self.membership.clone(),
            directory: self.presence.directory.clone(),
            counts: Arc::clone(&self.tasks),
        };
        worker.start(supervisor);
        let (presence, pulse, stop) = (self.presence.clone(), Arc::clone(&self.pulse), supervisor.token());
        supervisor.spawn_essential("store-presence", async move {
            stop.run_until_cancelled(presence.keep(&pulse)).await;
        });
        catalog_sync::start(self.membership.clone(), Arc::clone(&self.cataloged), supervisor);
        scrub::start(Arc::clone(&self.membership.pool), Arc::clone(&self.scrubbed), scrub_rate, supervisor);
    }

    /// Whether the machine has memory for so many bytes beside what is mounted.
    pub(crate) fn check_capacity(&self, size: u64) -> Result<(), String> {
        let pool = &self.membership.pool;
        if pool.lent().len() >= MAX_SEGMENTS {
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
    pub(crate) async fn mount_more(&self, size: u64) -> Result<Uuid, String> {
        self.check_capacity(size)?;
        let wanted = Wanted {
            keep: Keep::Process,
            label: "more".to_owned(),
            size,
            pages: Pages::Normal,
            placement: Placement::default(),
        };
        let opened = Segment::open(&wanted, |base| new_identity(base, size));
        self.lend(opened.map_err(|error| error.to_string())?).await
    }

    /// Lends a segment that ends with the process.
    pub(crate) async fn lend(&self, segment: Segment) -> Result<Uuid, String> {
        let identity = segment.ledger.identity();
        let registered = self.fabric.as_ref().map(|fabric| fabric.lend(&segment.region)).transpose();
        let registered = registered.map_err(|error| error.to_string())?;
        let lent = Lent::new(segment, uuid(identity.segment), identity.base, false).over(registered);
        let lent = Arc::new(lent);
        if !self.membership.pool.add(Arc::clone(&lent)) {
            return Err("its addresses are those of another segment; try again".to_owned());
        }
        self.presence.change(&self.membership);
        let told = async {
            self.presence.publish().await.map_err(|error| error.to_string())?;
            self.membership.mount(&lent).await.map_err(|error| error.to_string())
        };
        if let Err(error) = told.await {
            self.membership.pool.remove(lent.id);
            self.presence.change(&self.membership);
            return Err(error);
        }
        Ok(lent.id)
    }

    /// Takes a segment back.
    pub(crate) async fn unmount(&self, id: Uuid) -> Result<(), String> {
        if self.membership.pool.lent().iter().all(|lent| lent.id != id) {
            return Err(format!("this node lends no segment {id}"));
        }
        self.membership.unmount(id).await.map_err(|error| error.to_string())?;
        self.membership.pool.remove(id);
        self.presence.change(&self.membership);
        self.presence.publish().await.map_err(|error| error.to_string())
    }
}

/// Lets the disk be used: by the master for what it moves there, and by readers.
fn start_disk(
    disk: Arc<Disk>,
    listener: TcpListener,
    host: &Host,
    membership: &Membership,
    presence: &Presence,
    (peers, tls): (Peers, Option<PeerTls>),
    supervisor: &Supervisor,
) -> Result<Keeper, StartError> {
    let endpoint = host.endpoint(listener.local_addr()?.port());
    let own = Arc::clone(&membership.endpoint);
    let readers = disk::Readers { peers, authentication: tls.zip(membership.capabilities.clone()) };
    disk::listen(listener, Arc::clone(&disk), own, readers, supervisor);
    let keeper = Keeper {
        disk,
        membership: membership.clone(),
        directory: presence.directory.clone(),
        endpoint: endpoint.into(),
        leaving: CancellationToken::new(),
    };
    keeper.clone().start(supervisor);
    Ok(keeper)
}

/// Waits for the master, and lends it the memory.
async fn join(membership: &Membership, deadline: Instant) -> Result<(), StartError> {
    let mut retry = StartRetry::new(deadline);
    loop {
        let joined = async {
            membership.ready().await?;
            for lent in membership.pool.lent().iter() {
                let is_wanted = membership.announce_inventory(lent).await?;
                membership.mount(lent).await?;
                if is_wanted {
                    membership.offer_inventory(lent).await?;
                }
                membership.tell_whole(lent).await?;
            }
            Ok::<_, RpcError>(())
        };
        match joined.await {
            Ok(()) => return Ok(()),
            Err(source) => {
                let refused = matches!(source, RpcError::Refused(_) | RpcError::UnknownRelease { .. });
                if refused || retry.is_over() {
                    return Err(StartError::Master {
                        address: membership.master.address().to_owned(),
                        source,
                    });
                }
                retry.pause("the master", &source).await;
            }
        }
    }
}
