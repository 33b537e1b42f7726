//! The client of one store.

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

/// Puts objects into a store and gets them back. Cloning is cheap, and every clone shares connections and cache.
#[derive(Clone)]
pub struct KvClient {
    pub(crate) shared: Arc<KvClientInner>,
}

pub(crate) struct KvClientInner {
    pub(crate) objects: ObjectClient,
    pub(crate) peers: PeerTable,
    pub(crate) disk_nodes: DiskNodeTable,
    pub(crate) cache: HotCache,
    /// Keys that are being written.
    pub(crate) key_locks: KeyLocks,
    pub(crate) options: KvClientOptions,
    pub(crate) supervisor: Supervisor,
}

impl KvClient {
    /// A client of the store whose master is at `master`, a `host:port`. Connects when it is used first.
    ///
    /// Must be called inside the runtime in which it is used.
    ///
    /// # Errors
    /// When there can be no client for the metadata server, as for a URL that is none.
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
        let (disks, turns, supervisor) = (DiskNodeTable::default(), KeyLocks::default(), supervisor.clone());
        Ok(Self {
            shared: Arc::new(KvClientInner {
                objects,
                peers,
                disk_nodes: disks,
                cache,
                key_locks: turns,
                options,
                supervisor,
            }),
        })
    }

    /// The calls to the master that this client makes, for what it has no method for.
    #[must_use]
    pub fn objects(&self) -> &ObjectClient {
        &self.shared.objects
    }

    /// Bytes that were moved to or from nodes, until now: each slice of each replica counts when it is through.
    #[must_use]
    pub fn bytes_moved(&self) -> u64 {
        self.shared.peers.transferred_bytes()
    }
}
