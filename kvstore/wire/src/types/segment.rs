//! Segments of nodes, and the liveness of clients.

use super::Uuid;
use crate::pack::{layout, wire_code};

wire_code! {
    pub struct SegmentStatus(i32) {
        UNDEFINED = 0,
        OK = 1,
        /// Its objects are being moved away.
        DRAINING = 2,
        /// Its objects have been moved away.
        DRAINED = 3,
        /// Readable until the grace period ends.
        GRACEFULLY_UNMOUNTING = 4,
        UNMOUNTING = 5,
    }
}

wire_code! {
    /// Status of a client in the master.
    pub struct ClientStatus(i32) {
        UNDEFINED = 0,
        /// The client's segments are mounted.
        OK = 1,
        /// The client must mount its segments again.
        NEED_REMOUNT = 2,
    }
}

/// Where the memory of a segment is in its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentLocality<S> {
    /// NUMA node of the memory.
    pub numa_node: i32,
    /// Names of the network devices (host channel adapters) near the memory.
    pub hca_names: Vec<S>,
}

layout! { SegmentLocality<S> { numa_node, hca_names } }

/// A memory segment that a node adds to the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment<S> {
    /// Segment id, chosen by the node.
    pub id: Uuid,
    /// Endpoint of the node as `host:port`.
    pub name: S,
    /// Address of the first byte in the node.
    pub base: u64,
    /// Size of the segment in bytes.
    pub size: u64,
    /// Endpoint for transfers: the node's `host:port`.
    pub te_endpoint: S,
    /// Protocol for transfers, for example `tcp` or `rdma`.
    pub protocol: S,
    /// Host id of the node. Since 0.3.12.
    pub host_id: S,
    /// Location in the node, if it is known. Since 0.3.14.
    pub locality: Option<SegmentLocality<S>>,
}

impl<S> Segment<S> {
    /// The same segment with another type of strings.
    pub fn map_text<'a, T>(&'a self, convert: impl Fn(&'a S) -> T) -> Segment<T> {
        let locality = self.locality.as_ref().map(|locality| SegmentLocality {
            numa_node: locality.numa_node,
            hca_names: locality.hca_names.iter().map(&convert).collect(),
        });
        Segment {
            id: self.id,
            name: convert(&self.name),
            base: self.base,
            size: self.size,
            te_endpoint: convert(&self.te_endpoint),
            protocol: convert(&self.protocol),
            host_id: convert(&self.host_id),
            locality,
        }
    }
}

layout! {
    Segment<S> { id, name, base, size, te_endpoint, protocol, host_id since V0_3_12 }
    compatible since V0_3_14 { locality }
}

/// An NVMe-oF disk that a node adds to the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NofSegment<S> {
    /// Segment id, chosen by the node.
    pub id: Uuid,
    pub name: S,
    /// Address of the first byte.
    pub base: u64,
    /// Size of the segment in bytes.
    pub size: u64,
    /// Endpoint for transfers to the disk.
    pub te_endpoint: S,
}

layout! { NofSegment<S> { id, name, base, size, te_endpoint } }

/// The client that owns an NVMe-oF segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NofSegmentOwner {
    pub segment_id: Uuid,
    pub client_id: Uuid,
}

layout! { NofSegmentOwner { segment_id, client_id } }

/// The master's response to a heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PingReply {
    /// Number of leader changes so far.
    pub view_version_id: i64,
    /// Status of the client in the master.
    pub client_status: ClientStatus,
}

layout! { PingReply { view_version_id, client_status } }
