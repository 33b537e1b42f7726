//! How a client works, and how objects are kept.

use std::time::Duration;

use mooncake_wire::types::{DataType, ReplicateConfig, SoftPin as WireSoftPin, SoftPinAction};
use moongate_master_client::rpc::{self, StoreCredentials};
use moongate_transfer::{MetadataSource, TransferLimits, TransferProtocol};

use crate::locality::Locality;

/// How a client works.
#[derive(Clone, Debug)]
pub struct KvClientOptions {
    /// How the master is called.
    pub master: rpc::MasterClientOptions,
    /// Whose objects. Masters before 0.3.12, and those without tenants, know only `default`.
    pub tenant: String,
    /// Where nodes tell their data ports.
    pub metadata: MetadataSource,
    /// Which nodes are near.
    pub locality: Locality,
    /// TLS with certificates to master and nodes, and what the master grants; `None`: as Mooncake's. With it, transfers go over TCP only.
    pub authentication: Option<StoreCredentials>,
    /// Connections to one node at most. One more reader waits.
    pub connections_per_node: usize,
    /// Objects larger than this are cut into slices of at most this many bytes.
    pub slice_bytes: usize,
    /// Objects of a batch that are under way at once.
    pub batch_in_flight: usize,
    /// How often a put or get is tried from the start.
    pub attempts: u32,
    /// Largest object that is got, in bytes: what one answer of the master can make this client allocate.
    pub largest_object: u64,
    /// Speak nothing newer than this to nodes' data ports.
    pub newest_protocol: TransferProtocol,
    /// Limits of transfers.
    pub transfers: TransferLimits,
    /// Devices for transfers with nodes that have RDMA, by name; all that the machine has if there are no names.
    pub rdma_devices: Vec<String>,
    /// Whether written objects get a checksum, which masters since 0.3.13 keep, and what is read is compared with it.
    pub checksums: bool,
    /// Memory for objects that are read often; none if 0. What is kept is at most as old as its lease.
    pub cache_bytes: u64,
}

/// How long a thread stays awake for an answer that it has nothing to do without. A master or a node in the same data
/// centre answers within this time, and waking up takes as long again.
const BUSY_POLL: Duration = Duration::from_micros(100);

impl Default for KvClientOptions {
    fn default() -> Self {
        Self {
            master: rpc::MasterClientOptions { busy_poll: BUSY_POLL, ..rpc::MasterClientOptions::default() },
            tenant: mooncake_wire::types::DEFAULT_TENANT.to_owned(),
            metadata: MetadataSource::default(),
            locality: Locality::default(),
            authentication: None,
            connections_per_node: 4,
            slice_bytes: 4 << 20,
            batch_in_flight: 16,
            attempts: 3,
            largest_object: 4 << 30,
            newest_protocol: TransferProtocol::Checked,
            transfers: TransferLimits { busy_poll: BUSY_POLL, ..TransferLimits::default() },
            rdma_devices: Vec::new(),
            checksums: true,
            cache_bytes: 0,
        }
    }
}

/// Whether others are evicted before an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SoftPinChange {
    /// As it was.
    #[default]
    Unchanged,
    /// Others are evicted first, for this long, or for the master's default.
    Pinned(Option<Duration>),
    /// No longer.
    Unpinned,
}

/// How an object is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutOptions {
    /// Copies, each on another segment. The master makes fewer if there are not as many segments.
    pub replicas: u64,
    /// Whether others are evicted first.
    pub soft_pin: SoftPinChange,
    /// Whether it is never evicted. Masters since 0.3.10.post2 know this; for older ones it does nothing.
    pub hard_pin: bool,
    /// Names of segments to try first.
    pub preferred_segments: Vec<String>,
    /// The group with which the object is leased and evicted. Masters since 0.3.12 know this.
    pub group: Option<String>,
    /// What the object is.
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
            data_type: DataType::UNKNOWN,
        }
    }
}

impl PutOptions {
    /// For `objects` objects of a batch, written from the host of this id.
    pub(crate) fn config<'a>(&'a self, objects: usize, host_id: &'a str) -> ReplicateConfig<&'a str> {
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
            group_ids: self.group.as_deref().map(|group| vec![group; objects]),
            ..ReplicateConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_become_what_the_master_reads() {
        let plain = PutOptions::default();
        assert_eq!(plain.config(1, ""), ReplicateConfig::default());
        let pinned = PutOptions {
            replicas: 2,
            soft_pin: SoftPinChange::Pinned(Some(Duration::from_secs(2))),
            preferred_segments: vec!["a:1".to_owned()],
            group: Some("g".to_owned()),
            ..plain
        };
        let config = pinned.config(2, "here");
        assert_eq!((config.replica_num, config.preferred_segments), (2, vec!["a:1"]));
        assert_eq!(config.soft_pin, WireSoftPin { action: SoftPinAction::ENABLE, ttl_ms: Some(2000) });
        assert_eq!((config.group_ids, config.host_id), (Some(vec!["g", "g"]), "here"));
    }
}
