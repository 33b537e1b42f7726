//! The client of one store.

use std::sync::Arc;

use mooncake_wire::types::Uuid;
use moongate_kvstore::rpc::{Master, Objects};
use moongate_runtime::Supervisor;
use moongate_transfer::DirectoryError;

use crate::cache::HotCache;
use crate::options::Options;
use crate::peer::Peers;
use crate::staged::Disks;
use crate::turns::Turns;

/// Puts objects into a store and gets them back. Cloning is cheap, and every clone shares connections and cache.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) objects: Objects,
    pub(crate) peers: Peers,
    pub(crate) disks: Disks,
    pub(crate) cache: HotCache,
    /// Keys that are being written.
    pub(crate) turns: Turns,
    pub(crate) options: Options,
    pub(crate) supervisor: Supervisor,
}

impl Client {
    /// A client of the store whose master is at `master`, a `host:port`. Connects when it is used first.
    ///
    /// Must be called inside the runtime in which it is used.
    ///
    /// # Errors
    /// When there can be no client for the metadata server, as for a URL that is none.
    pub fn new(master: &str, options: Options, supervisor: &Supervisor) -> Result<Self, DirectoryError> {
        let client_id = Uuid { first: fastrand::u64(1..), second: fastrand::u64(1..) };
        let authentication = options.authentication.clone();
        let master = Master::authenticated(master, options.master, authentication, supervisor);
        let objects = Objects::new(master, client_id, &options.tenant);
        let (peers, cache) = (Peers::new(options.clone())?, HotCache::new(options.cache_bytes));
        let (disks, turns, supervisor) = (Disks::default(), Turns::default(), supervisor.clone());
        Ok(Self { shared: Arc::new(Shared { objects, peers, disks, cache, turns, options, supervisor }) })
    }

    /// The calls to the master that this client makes, for what it has no method for.
    #[must_use]
    pub fn objects(&self) -> &Objects {
        &self.shared.objects
    }

    /// Bytes that were moved to or from nodes, until now: each slice of each replica counts when it is through.
    #[must_use]
    pub fn bytes_moved(&self) -> u64 {
        self.shared.peers.moved()
    }
}
