//! Starts a router.

use std::net::SocketAddr;
use std::sync::Arc;

use mooncake_wire::Dialect;
use mooncake_wire::caller_dialect::DialectRegistry;
use moongate_master_client::rpc::{MasterAddress, MasterAddressError};
use moongate_runtime::{BindError, ListenerLimits, ListenerSocket, Supervisor, bind};
use moongate_store_shards::{InvalidShardCount, ShardCount};
use tokio_util::sync::CancellationToken;

use crate::admin::{AdminState, ShardAdmins, admin_routes};
use crate::connection::RouterState;
use crate::counters::RouterCounters;
use crate::listener::RouterListener;
use crate::masters::ShardMasters;
use crate::options::RouterOptions;
use crate::segment_sizes::SegmentSizes;

/// A router could not be started.
#[derive(Debug, thiserror::Error)]
pub enum RouterStartError {
    #[error("--shards: {0}")]
    ShardCount(InvalidShardCount),
    #[error("--shards: {0}")]
    Address(#[from] MasterAddressError),
    /// The same master twice: its objects would be found in one of the two shards only.
    #[error("--shards: {0} is given twice; each shard is another master")]
    Duplicate(String),
    #[error("--shard-admins has {admins} addresses for {shards} shards; give one for each, in their order")]
    AdminCount { admins: usize, shards: usize },
    #[error("--shard-admins: `{0}` is not HOST:PORT")]
    AdminAddress(String),
    #[error("the admin server of {0} cannot be derived from its address; give --shard-admins")]
    AdminUnknown(String),
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("cannot listen: {0}")]
    Listen(#[from] std::io::Error),
    #[error("cannot create the HTTP client: {0}")]
    Http(#[source] reqwest::Error),
}

impl RouterStartError {
    /// Whether a setting is invalid, so that another start would fail as well.
    pub fn is_invalid_setting(&self) -> bool {
        !matches!(self, Self::Bind(_) | Self::Listen(_) | Self::Http(_))
    }
}

/// A running router.
#[derive(Debug)]
pub struct RunningRouter {
    address: SocketAddr,
    admin_address: SocketAddr,
    stop: CancellationToken,
}

impl RunningRouter {
    /// Bound address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bound address of the admin server.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// Accepts no more connections, and closes each one after its current call. The supervisor's shutdown waits for that.
    pub fn stop(&self) {
        self.stop.cancel();
    }
}

/// Starts a router. It stops with the supervisor.
///
/// # Errors
/// [`RouterStartError`].
pub fn start(options: &RouterOptions, supervisor: &Supervisor) -> Result<RunningRouter, RouterStartError> {
    let count = ShardCount::new(options.shards.len()).map_err(RouterStartError::ShardCount)?;
    for (index, address) in options.shards.iter().enumerate() {
        MasterAddress::parse(address, None)?;
        if options.shards.iter().take(index).any(|earlier| earlier == address) {
            return Err(RouterStartError::Duplicate(address.clone()));
        }
    }
    let admins = ShardAdmins::new(options)?;
    let counters = Arc::new(RouterCounters::new(count.get()));
    let router = Arc::new(RouterState {
        masters: ShardMasters::new(count, options, Arc::clone(&counters)),
        dialects: DialectRegistry::new(Dialect::NEWEST),
        segments: SegmentSizes::default(),
        max_frame_bytes: options.max_frame_bytes,
        stall_timeout: options.stall_timeout,
        master_tasks: supervisor.child(),
    });
    let (listener, admin) = (bind(options.listen)?, bind(options.admin_listen)?);
    let (address, admin_address) = (listener.local_addr()?, admin.local_addr()?);
    let stop = supervisor.token().child_token();
    let routes = admin_routes(AdminState { admins, counters, count });
    let limits = ListenerLimits::default();
    moongate_runtime::serve(ListenerSocket::from(admin), routes, limits, supervisor.token(), supervisor);
    let listener = RouterListener {
        listener,
        router,
        max_connections: options.max_connections,
        supervisor: supervisor.clone(),
        stop: stop.clone(),
    };
    supervisor.spawn_essential("router-listener", listener.run());
    tracing::info!(%address, admin = %admin_address, shards = count.get(), "routing calls of Mooncake clients");
    Ok(RunningRouter { address, admin_address, stop })
}
