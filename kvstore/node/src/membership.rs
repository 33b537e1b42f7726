//! What a node tells the master about itself.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::intact_ranges::IntactRangesArguments;
use mooncake_wire::rpc::{
    ClientArguments, HEARTBEATS_ONLY, MEMORY_RETAINED, MountArguments, MountSegment, NODE_DRAINED,
    NoArguments, Ping, ReMountSegment, RemountArguments, ServiceReady, UnmountArguments, UnmountSegment,
};
use mooncake_wire::types::{ClientStatus, Segment, Uuid};
use moongate_master_client::rpc::{MasterClient, RpcError};

use crate::capabilities::CapabilityChecker;
use crate::drain_hooks::NodeDrainState;
use crate::segment_pool::{MountedSegment, SegmentPool};

/// How transfers reach a node without RDMA.
pub(crate) const PROTOCOL: &str = "tcp";

/// Parts of a segment that are told at a time.
const RANGES_PER_CALL: usize = 16_384;

/// A node as a member of a store.
#[derive(Clone, Debug)]
pub(crate) struct NodeMembership {
    pub(crate) master: MasterClient,
    /// Whether the connection to the master carries heartbeats only.
    pub(crate) heartbeats_only: bool,
    pub(crate) client_id: Uuid,
    /// The node's name, which is also where it answers handshakes.
    pub(crate) endpoint: Arc<str>,
    pub(crate) host: Arc<str>,
    pub(crate) pool: Arc<SegmentPool>,
    /// Whether its listening sockets are kept while no process of it runs.
    pub(crate) sockets_persist: bool,
    /// Whether it is going to be replaced.
    pub(crate) drain: Arc<NodeDrainState>,
    /// How transfers reach the node, as the master tells clients.
    pub(crate) protocol: &'static str,
    /// The keys of segments, if peers are authenticated.
    pub(crate) capabilities: Option<Arc<CapabilityChecker>>,
}

impl NodeMembership {
    /// The same with a connection of its own for heartbeats, for another runtime.
    pub(crate) fn with_heartbeat_master(&self, master: MasterClient) -> Self {
        Self { master, heartbeats_only: true, ..self.clone() }
    }

    /// Whether the master is there.
    pub(crate) async fn ready(&self) -> Result<String, RpcError> {
        Ok(self.master.call::<ServiceReady, &str>(&NoArguments).await??)
    }

    /// Lends a segment. One that is lent already stays so, with what the master keeps in it.
    pub(crate) async fn mount(&self, lent: &MountedSegment) -> Result<(), RpcError> {
        let arguments = MountArguments { segment: self.segment(lent), client_id: self.client_id };
        match self.master.call_with_attachment::<MountSegment, &str>(&arguments, self.attachment()).await? {
            Ok(()) | Err(ErrorCode::SEGMENT_ALREADY_EXISTS) => self.send_key(lent.id).await,
            Err(code) => Err(code.into()),
        }
    }

    /// Sends the master the keys of all segments. It holds them in memory only, so they are sent again with each heartbeat.
    pub(crate) async fn send_keys(&self) -> Result<(), RpcError> {
        for lent in self.pool.segments().iter() {
            self.send_key(lent.id).await?;
        }
        Ok(())
    }

    /// Sends the master the key of a segment, if peers are authenticated.
    async fn send_key(&self, segment: Uuid) -> Result<(), RpcError> {
        let Some(capabilities) = &self.capabilities else { return Ok(()) };
        match capabilities.key_of(self.client_id, segment) {
            Ok(key) => self.master.send_segment_key(&key).await,
            Err(error) => {
                tracing::error!(%error, "no key for a segment: it cannot be read or written");
                Ok(())
            }
        }
    }

    /// Lends all segments to a master that has forgotten them.
    pub(crate) async fn remount(&self) -> Result<(), RpcError> {
        let lent = self.pool.segments();
        let segments = lent.iter().map(|lent| self.segment(lent)).collect();
        let arguments = RemountArguments { segments, client_id: self.client_id };
        let mut wanted = Vec::new();
        for it in lent.iter() {
            if self.announce_inventory(it).await? {
                wanted.push(it);
            }
        }
        self.master.call_with_attachment::<ReMountSegment, &str>(&arguments, self.attachment()).await??;
        self.send_keys().await?;
        for it in wanted {
            self.offer_inventory(it).await?;
        }
        Ok(())
    }

    /// Takes a segment back. What is kept in it is gone.
    pub(crate) async fn unmount(&self, segment_id: Uuid) -> Result<(), RpcError> {
        let arguments = UnmountArguments { segment_id, client_id: self.client_id };
        match self.master.call::<UnmountSegment, &str>(&arguments).await? {
            Ok(()) | Err(ErrorCode::SEGMENT_NOT_FOUND) => {
                self.capabilities.iter().for_each(|it| it.remove(segment_id));
                Ok(())
            }
            Err(code) => Err(code.into()),
        }
    }

    /// Tells the master what an earlier process had not written to its end, so that no reader is sent there. Masters of
    /// Mooncake's do not want to know: their readers are refused.
    pub(crate) async fn report_intact_ranges(&self, lent: &MountedSegment) -> Result<(), RpcError> {
        let Some(whole) = lent.intact_ranges() else { return Ok(()) };
        match self.send_intact_ranges(lent, &whole).await {
            Ok(0) => {}
            Ok(lost) => tracing::warn!(replicas = lost, "not written to their end when this node ended"),
            Err(RpcError::Fault(fault)) => tracing::debug!(%fault, "the master does not ask what is whole"),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn send_intact_ranges(&self, lent: &MountedSegment, whole: &[(u64, u64)]) -> Result<u64, RpcError> {
        let (mut lost, mut from, mut rest) = (0, 0, whole);
        loop {
            let (now, after) = rest.split_at(rest.len().min(RANGES_PER_CALL));
            let to = after.first().map_or(lent.size, |(start, _)| *start);
            let (starts, ends) = now.iter().copied().unzip();
            let (client_id, segment_id) = (self.client_id, lent.id);
            let arguments = IntactRangesArguments { client_id, segment_id, from, to, starts, ends };
            lost += self.master.report_intact_ranges(&arguments).await?;
            if after.is_empty() {
                return Ok(lost);
            }
            (from, rest) = (to, after);
        }
    }

    /// A heartbeat.
    pub(crate) async fn ping(&self) -> Result<ClientStatus, RpcError> {
        let arguments = ClientArguments { client_id: self.client_id };
        let answer = self.master.call_with_attachment::<Ping, &str>(&arguments, self.attachment()).await??;
        Ok(answer.client_status)
    }

    /// What masters of this house are told besides.
    fn attachment(&self) -> &'static [u8] {
        match (self.survives_restart(), self.drain.is_set()) {
            (true, true) => NODE_DRAINED,
            (true, false) => MEMORY_RETAINED,
            (false, _) if self.heartbeats_only => HEARTBEATS_ONLY,
            (false, _) => &[],
        }
    }

    /// Whether the node's next process goes on with all that it has, and readers may wait for that.
    pub(crate) fn survives_restart(&self) -> bool {
        self.sockets_persist && self.pool.segments().iter().all(|lent| lent.is_persistent)
    }

    fn segment(&self, lent: &MountedSegment) -> Segment<&str> {
        Segment {
            id: lent.id,
            name: &self.endpoint,
            base: lent.base,
            size: lent.size,
            te_endpoint: &self.endpoint,
            protocol: self.protocol,
            host_id: &self.host,
        }
    }
}
