//! Options of clients and of puts.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use mooncake_wire::types::{DataType, ReplicateConfig, SoftPin as WireSoftPin, SoftPinAction};
use moongate_master_client::rpc::{self, StoreCredentials};
use moongate_runtime::BackoffPolicy;
use moongate_transfer::{MetadataSource, SharedMappings, TransferLimits, TransferProtocol};

use crate::locality::Locality;

/// Options of a [`KvClient`](crate::KvClient): connections, limits and caching.
#[derive(Clone, Debug)]
pub struct KvClientOptions {
    /// Options of the connection to the master.
    pub master: rpc::MasterClientOptions,
    /// Tenant of all objects. Masters before 0.3.12, and those without tenants, support only `default`.
    pub tenant: String,
    /// Where nodes publish their data ports.
    pub metadata: MetadataSource,
    /// Distances of nodes, which decide between replicas.
    pub locality: Locality,
    /// Mutual TLS with master and nodes, and the master's capabilities; `None` for Mooncake's plain protocol. With it, transfers use TCP only.
    pub authentication: Option<StoreCredentials>,
    /// Maximum number of connections to one node. Further transfers wait.
    pub connections_per_node: usize,
    /// Objects larger than this are split into slices of at most this many bytes; reads from nodes on this host, of four times as many.
    pub slice_bytes: usize,
    /// Maximum number of concurrent transfers of a batch, in objects.
    pub batch_in_flight: usize,
    /// Maximum number of attempts of a put or get.
    pub attempts: u32,
    /// Maximum number of attempts of a put to allocate space, with pauses of up to half a second, while the master has none. With 1 a put to
    /// a full store fails at once.
    pub allocation_attempts: u32,
    /// Largest object that can be read, in bytes. It limits what one response of the master can make this client allocate.
    pub largest_object: u64,
    /// Newest protocol version to use with nodes' data ports.
    pub newest_protocol: TransferProtocol,
    /// Memory of nodes on this host that is mapped, so that objects are copied in one step. Clones share it. With `None`, objects of all
    /// nodes go through sockets.
    pub shared_memory: Option<SharedMappings>,
    /// Time limits and busy polling of transfers.
    pub transfers: TransferLimits,
    /// RDMA devices by name, for transfers with nodes that have RDMA; all devices of the machine if empty.
    pub rdma_devices: Vec<String>,
    /// Whether puts send a checksum, which masters since 0.3.13 store, and gets verify it.
    pub checksums: bool,
    /// Size of the cache of frequently read objects in bytes; 0 turns it off. Entries expire with their lease.
    pub cache_bytes: u64,
}

/// How long a thread busy-polls for a response when it has no other work. A master or node in the same data centre responds
/// within this time, and a wakeup takes as long again.
const BUSY_POLL: Duration = Duration::from_micros(100);
/// Pauses between attempts to reach the master: short, so that a new leader or a restarted master is found soon. Only calls cause attempts.
const MASTER_RETRY: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(50), max: Duration::from_millis(250) };

impl Default for KvClientOptions {
    fn default() -> Self {
        Self {
            master: rpc::MasterClientOptions {
                busy_poll: BUSY_POLL,
                retry: MASTER_RETRY,
                ..rpc::MasterClientOptions::default()
            },
            tenant: mooncake_wire::types::DEFAULT_TENANT.to_owned(),
            metadata: MetadataSource::default(),
            locality: Locality::default(),
            authentication: None,
            connections_per_node: 4,
            slice_bytes: 4 << 20,
            batch_in_flight: 16,
            attempts: 3,
            allocation_attempts: 6,
            largest_object: 4 << 30,
            newest_protocol: TransferProtocol::Checked,
            shared_memory: Some(SharedMappings::default()),
            transfers: TransferLimits { busy_poll: BUSY_POLL, ..TransferLimits::default() },
            rdma_devices: Vec::new(),
            checksums: true,
            cache_bytes: 0,
        }
    }
}

/// Change of an object's soft pin: pinned objects are evicted after others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SoftPinChange {
    /// Leave the pin as it is.
    #[default]
    Unchanged,
    /// Pin the object for this long, or for the master's default time.
    Pinned(Option<Duration>),
    /// Remove an existing pin, so that the object is evicted normally.
    Unpinned,
}

/// Options of a put or upsert: replication, pins and placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutOptions {
    /// Number of replicas, each on another segment. The master allocates fewer if there are fewer segments.
    pub replicas: u64,
    /// Change of the object's soft pin.
    pub soft_pin: SoftPinChange,
    /// Whether the object is never evicted. Supported by masters since 0.3.10.post2; older ones ignore it.
    pub hard_pin: bool,
    /// Names of segments on which to allocate first.
    pub preferred_segments: Vec<String>,
    /// Group with which the object is leased and evicted. Supported by masters since 0.3.12.
    pub group: Option<String>,
    /// Groups of a batch's objects, in the same order, instead of `group`. Empty if `group` holds for all of them.
    pub object_groups: Vec<String>,
    /// Whether the objects of a batch are allocated on one node if possible. Supported by masters since 0.3.10.post2.
    pub one_node: bool,
    /// Kind of content, as reported to the master.
    pub data_type: DataType,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self {
            replicas: 1,
            soft_pin: SoftPinChange::default(),
            hard_pin: false,
            preferred_segments: Vec::new(),
            group: None,
            object_groups: Vec::new(),
            one_node: false,
            data_type: DataType::UNKNOWN,
        }
    }
}

impl PutOptions {
    /// The options of a batch of some of the objects, in this order.
    #[must_use]
    pub fn of_indices(&self, indices: &[usize]) -> Cow<'_, Self> {
        if self.object_groups.is_empty() {
            return Cow::Borrowed(self);
        }
        let group = |index: &usize| self.object_groups.get(*index).cloned().unwrap_or_default();
        Cow::Owned(Self { object_groups: indices.iter().map(group).collect(), ..self.clone() })
    }

    /// The options of some objects of a batch.
    pub(crate) fn of_objects(&self, range: Range<usize>) -> Cow<'_, Self> {
        if self.object_groups.is_empty() {
            return Cow::Borrowed(self);
        }
        let object_groups = self.object_groups.get(range).unwrap_or_default().to_vec();
        Cow::Owned(Self { object_groups, ..self.clone() })
    }

    /// The wire configuration for the objects with these indices in a batch, written from the host with this id.
    pub(crate) fn config<'a>(&'a self, objects: &[usize], host_id: &'a str) -> ReplicateConfig<&'a str> {
        let (action, ttl) = match self.soft_pin {
            SoftPinChange::Unchanged => (SoftPinAction::PRESERVE, None),
            SoftPinChange::Pinned(ttl) => (SoftPinAction::ENABLE, ttl),
            SoftPinChange::Unpinned => (SoftPinAction::DISABLE, None),
        };
        let ttl_ms = ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
        ReplicateConfig {
            replica_num: self.replicas.max(1),
            soft_pin: WireSoftPin { action, ttl_ms },
            with_hard_pin: self.hard_pin,
            preferred_segments: self.preferred_segments.iter().map(String::as_str).collect(),
            data_type: self.data_type,
            host_id,
            prefer_alloc_in_same_node: self.one_node,
            group_ids: self.group_ids(objects),
            ..ReplicateConfig::default()
        }
    }

    fn group_ids(&self, objects: &[usize]) -> Option<Vec<&str>> {
        if self.object_groups.is_empty() {
            return self.group.as_deref().map(|group| vec![group; objects.len()]);
        }
        let group = |index: &usize| self.object_groups.get(*index).map_or("", String::as_str);
        Some(objects.iter().map(group).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn put_options_convert_to_the_wire_configuration() {
        let plain = PutOptions::default();
        assert_eq!(plain.config(&[0], ""), ReplicateConfig::default());
        let pinned = PutOptions {
            replicas: 2,
            soft_pin: SoftPinChange::Pinned(Some(Duration::from_secs(2))),
            preferred_segments: vec!["a:1".to_owned()],
            group: Some("g".to_owned()),
            ..plain
        };
        let config = pinned.config(&[0, 1], "here");
        assert_eq!((config.replica_num, config.preferred_segments), (2, vec!["a:1"]));
        assert_eq!(config.soft_pin, WireSoftPin { action: SoftPinAction::ENABLE, ttl_ms: Some(2000) });
        assert_eq!((config.group_ids, config.host_id), (Some(vec!["g", "g"]), "here"));
    }

    #[test]
    fn each_object_of_a_batch_has_its_own_group() {
        let object_groups = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
        let options = PutOptions { object_groups, ..PutOptions::default() };
        // Object 1 was rejected before the call to the master.
        assert_eq!(options.config(&[0, 2], "").group_ids, Some(vec!["a", "c"]));
        let part = options.of_objects(2..4);
        assert_eq!(part.config(&[0, 1], "").group_ids, Some(vec!["c", "d"]));
        assert_eq!(part.of_objects(1..2).config(&[0], "").group_ids, Some(vec!["d"]));
        assert_eq!(options.of_indices(&[3, 0]).object_groups, ["d", "a"]);
        assert_eq!(PutOptions::default().of_objects(0..9).config(&[0], "").group_ids, None);
    }
}
