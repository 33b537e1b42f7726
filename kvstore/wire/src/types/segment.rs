//! What nodes contribute, and whether they live.

use super::Uuid;
use crate::pack::{layout, wire_code};

wire_code! {
    /// What becomes of a segment.
    pub struct SegmentStatus(i32) {
        /// Not set.
        UNDEFINED = 0,
        /// It is mounted and takes objects.
        OK = 1,
        /// Its objects are being moved away.
        DRAINING = 2,
        /// Its objects have been moved away.
        DRAINED = 3,
        /// It is read for a while before it is unmounted.
        GRACEFULLY_UNMOUNTING = 4,
        /// It is being unmounted.
        UNMOUNTING = 5,
    }
}

wire_code! {
    /// What the master thinks of a client.
    pub struct ClientStatus(i32) {
        /// Not set.
        UNDEFINED = 0,
        /// All is well.
        OK = 1,
        /// The master does not know the client's segments: it shall mount them again.
        NEED_REMOUNT = 2,
    }
}

/// Memory that a node lends to the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment<S> {
    /// Chosen by the node.
    pub id: Uuid,
    /// The node's `host:port`.
    pub name: S,
    /// Address of the first byte in the node.
    pub base: u64,
    /// Bytes.
    pub size: u64,
    /// Where transfers go: the node's `host:port`.
    pub te_endpoint: S,
    /// How transfers go, for example `tcp` or `rdma`.
    pub protocol: S,
    /// The node's host. Since 0.3.12.
    pub host_id: S,
}

layout! { Segment<S> { id, name, base, size, te_endpoint, protocol, host_id since V0_3_12 } }

/// A disk behind NVMe over fabrics that a node lends to the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NofSegment<S> {
    /// Chosen by the node.
    pub id: Uuid,
    /// Its name.
    pub name: S,
    /// Address of the first byte.
    pub base: u64,
    /// Bytes.
    pub size: u64,
    /// Where transfers go.
    pub te_endpoint: S,
}

layout! { NofSegment<S> { id, name, base, size, te_endpoint } }

/// Who lends an NVMe-oF segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NofSegmentOwner {
    /// The segment.
    pub segment_id: Uuid,
    /// The client.
    pub client_id: Uuid,
}

layout! { NofSegmentOwner { segment_id, client_id } }

/// The master's answer to a heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PingReply {
    /// Counts changes of the leader.
    pub view_version_id: i64,
    /// What the master thinks of the client.
    pub client_status: ClientStatus,
}

layout! { PingReply { view_version_id, client_status } }
