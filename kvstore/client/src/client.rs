//! Client of one store: shared state and construction.

use std::sync::Arc;

use mooncake_wire::types::Uuid;
use moongate_master_client::rpc::{MasterClient, ObjectClient};
use moongate_runtime::Supervisor;
use moongate_transfer::DirectoryError;

use crate::cache::HotCache;
use crate::disk_staging::DiskNodeTable;
use crate::key_locks::KeyLocks;
use crate::options::KvClientOptions;
use crate::peer::PeerTable;

/// Puts and gets objects of a store. Clones are cheap and share connections and cache.
#[derive(Clone)]
pub struct KvClient {
    pub(crate) shared: Arc<KvClientInner>,
}

pub(crate) struct KvClientInner {
    pub(crate) objects: ObjectClient,
    pub(crate) peers: PeerTable,
    pub(crate) disk_nodes: DiskNodeTable,
    pub(crate) cache: HotCache,
    /// Serializes writes of the same key.
    pub(crate) key_locks: KeyLocks,
    pub(crate) options: KvClientOptions,
    pub(crate) supervisor: Supervisor,
}

impl KvClient {
    /// A client of the store whose master is at `master`, a `host:port`. Connects on first use.
    ///
    /// Must be called inside the runtime in which it is used.
    ///
    /// # Errors
    /// When the client of the metadata server cannot be created, for example because its URL is invalid.
    pub fn new(
        master: &str,
        options: KvClientOptions,
        supervisor: &Supervisor,
    ) -> Result<Self, DirectoryError> {
        let client_id = Uuid { first: fastrand::u64(1..), second: fastrand::u64(1..) };
        let authentication = options.authentication.clone();
        let master = MasterClient::authenticated(master, options.master, authentication, supervisor);
        let objects = ObjectClient::new(master, client_id, &options.tenant);
        let (peers, cache) = (PeerTable::new(options.clone())?, HotCache::new(options.cache_bytes));
        Ok(Self {
            shared: Arc::new(KvClientInner {
                objects,
                peers,
                disk_nodes: DiskNodeTable::default(),
                cache,
                key_locks: KeyLocks::default(),
                options,
                supervisor: supervisor.clone(),
            }),
        })
    }

    /// The underlying master calls, for operations without a method here.
    #[must_use]
    pub fn objects(&self) -> &ObjectClient {
        &self.shared.objects
    }

    /// Bytes transferred to and from nodes so far. Each slice of each replica is counted when its transfer completes.
    #[must_use]
    pub fn bytes_moved(&self) -> u64 {
        self.shared.peers.transferred_bytes()
    }
}
