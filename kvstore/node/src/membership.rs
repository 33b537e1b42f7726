//! A node's calls to the master: mounting segments, heartbeats, keys and intact ranges.

use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::ErrorCode;
use mooncake_wire::intact_ranges::IntactRangesArguments;
use mooncake_wire::rpc::{
    ClientArguments, HEARTBEATS_ONLY, MEMORY_RETAINED, MountArguments, MountSegment, NODE_DRAINED,
    NoArguments, Ping, ReMountSegment, RemountArguments, ServiceReady, UnmountArguments, UnmountSegment,
};
use mooncake_wire::types::{ClientStatus, Segment, Uuid};
use moongate_master_client::rpc::{MasterClient, RpcError};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::capabilities::CapabilityChecker;
use crate::error::NodeStartError;
use crate::inventory::SegmentInventory;
use crate::segment_pool::{MountedSegment, SegmentPool};
use crate::start_retry::StartRetry;

/// Maximum number of intact ranges in one request.
const RANGES_PER_CALL: usize = 16_384;
/// The drain state ends by itself this long after the last `/drain`, if the node was not replaced.
pub(crate) const DRAIN_EXPIRY: Duration = Duration::from_secs(600);

/// Whether the node is about to be replaced.
#[derive(Debug, Default)]
pub(crate) struct NodeDrainState(Mutex<Option<Instant>>);

impl NodeDrainState {
    pub(crate) fn is_set(&self) -> bool {
        self.0.lock().is_some_and(|until| Instant::now() < until)
    }

    pub(crate) fn set(&self, drained: bool) {
        *self.0.lock() = drained.then(|| Instant::now() + DRAIN_EXPIRY);
    }
}

/// A node's identity in the store, and its connection to the master.
#[derive(Clone, Debug)]
pub(crate) struct NodeMembership {
    pub(crate) master: MasterClient,
    /// Whether the connection to the master carries heartbeats only.
    pub(crate) heartbeats_only: bool,
    pub(crate) client_id: Uuid,
    /// The node's name, which is also the address of its handshake port.
    pub(crate) endpoint: Arc<str>,
    pub(crate) host: Arc<str>,
    pub(crate) pool: Arc<SegmentPool>,
    /// Whether a holder keeps the listening sockets open while the node restarts.
    pub(crate) sockets_persist: bool,
    /// Whether the node is about to be replaced.
    pub(crate) drain: Arc<NodeDrainState>,
    /// Transfer protocol that the master passes on to clients.
    pub(crate) protocol: &'static str,
    /// Keys of the segments, if peers are authenticated.
    pub(crate) capabilities: Option<Arc<CapabilityChecker>>,
}

impl NodeMembership {
    /// A copy with a separate connection for heartbeats, which run on another runtime.
    pub(crate) fn with_heartbeat_master(&self, master: MasterClient) -> Self {
        Self { master, heartbeats_only: true, ..self.clone() }
    }

    /// Waits for the master, and mounts the segments.
    ///
    /// # Errors
    /// [`NodeStartError::Master`] if the master refuses the node, or does not answer by the deadline.
    pub(crate) async fn join(&self, deadline: Instant) -> Result<(), NodeStartError> {
        let mut retry = StartRetry::new(deadline);
        loop {
            match self.mount_all().await {
                Ok(()) => return Ok(()),
                Err(source) => {
                    let refused = match &source {
                        // A router that could not call a shard has refused nothing.
                        RpcError::Refused(code) => !code.is_no_response(),
                        source => matches!(source, RpcError::UnknownRelease { .. }),
                    };
                    if refused || retry.is_expired() {
                        let address = self.master.address().to_owned();
                        return Err(NodeStartError::Master { address, source });
                    }
                    retry.pause("the master", &source).await;
                }
            }
        }
    }

    async fn mount_all(&self) -> Result<(), RpcError> {
        self.ready().await?;
        for mounted in self.pool.segments().iter() {
            let inventory = self.inventory(mounted);
            let has_inventory = inventory.announce().await?;
            self.mount(mounted).await?;
            if has_inventory {
                inventory.offer().await?;
            }
            self.report_intact_ranges(mounted).await?;
        }
        Ok(())
    }

    /// The objects of a segment, to be offered to the master if it lost its log.
    pub(crate) fn inventory<'a>(&'a self, segment: &'a MountedSegment) -> SegmentInventory<'a> {
        SegmentInventory { master: &self.master, client_id: self.client_id, segment }
    }

    /// Checks that the master is ready to serve.
    async fn ready(&self) -> Result<String, RpcError> {
        Ok(self.master.call::<ServiceReady, &str>(&NoArguments).await??)
    }

    /// Mounts a segment. If it is mounted already, the mount and its objects stay.
    pub(crate) async fn mount(&self, segment: &MountedSegment) -> Result<(), RpcError> {
        let arguments = MountArguments { segment: self.segment(segment), client_id: self.client_id };
        match self.master.call_with_attachment::<MountSegment, &str>(&arguments, self.attachment()).await? {
            Ok(()) | Err(ErrorCode::SEGMENT_ALREADY_EXISTS) => self.send_key(segment.id).await,
            Err(code) => Err(code.into()),
        }
    }

    /// Sends the master the keys of all segments. It stores them in memory only, so they are sent again with each heartbeat.
    pub(crate) async fn send_keys(&self) -> Result<(), RpcError> {
        for segment in self.pool.segments().iter() {
            self.send_key(segment.id).await?;
        }
        Ok(())
    }

    /// Sends the master the key of a segment, if peers are authenticated.
    async fn send_key(&self, segment: Uuid) -> Result<(), RpcError> {
        let Some(capabilities) = &self.capabilities else { return Ok(()) };
        match capabilities.key_of(self.client_id, segment) {
            Ok(key) => self.master.send_segment_key(&key).await,
            Err(error) => {
                tracing::error!(%error, "cannot generate a key for a segment: peers cannot read or write it");
                Ok(())
            }
        }
    }

    /// Mounts all segments again after the master expired this node.
    pub(crate) async fn remount(&self) -> Result<(), RpcError> {
        let mounted = self.pool.segments();
        let segments = mounted.iter().map(|segment| self.segment(segment)).collect();
        let arguments = RemountArguments { segments, client_id: self.client_id };
        let mut accepted = Vec::new();
        for segment in mounted.iter() {
            if self.inventory(segment).announce().await? {
                accepted.push(segment);
            }
        }
        self.master.call_with_attachment::<ReMountSegment, &str>(&arguments, self.attachment()).await??;
        self.send_keys().await?;
        for segment in accepted {
            self.inventory(segment).offer().await?;
        }
        Ok(())
    }

    /// Unmounts a segment. The master drops the replicas in it.
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

    /// Reports which ranges an earlier process wrote completely, so that the master sends no reader to the others. Mooncake's
    /// masters lack this call; the node then refuses such reads.
    async fn report_intact_ranges(&self, segment: &MountedSegment) -> Result<(), RpcError> {
        let Some(ranges) = segment.intact_ranges() else { return Ok(()) };
        match self.send_intact_ranges(segment, &ranges).await {
            Ok(0) => {}
            Ok(lost) => tracing::warn!(
                replicas = lost,
                "incomplete replicas were dropped: the previous process stopped during their writes"
            ),
            Err(RpcError::Fault(fault)) => {
                tracing::debug!(%fault, "the master does not support intact ranges");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn send_intact_ranges(
        &self,
        segment: &MountedSegment,
        ranges: &[(u64, u64)],
    ) -> Result<u64, RpcError> {
        let (mut lost, mut from, mut rest) = (0, 0, ranges);
        loop {
            let (chunk, after) = rest.split_at(rest.len().min(RANGES_PER_CALL));
            let to = after.first().map_or(segment.size, |(start, _)| *start);
            let (starts, ends) = chunk.iter().copied().unzip();
            let (client_id, segment_id) = (self.client_id, segment.id);
            let arguments = IntactRangesArguments { client_id, segment_id, from, to, starts, ends };
            lost += self.master.report_intact_ranges(&arguments).await?;
            if after.is_empty() {
                return Ok(lost);
            }
            (from, rest) = (to, after);
        }
    }

    /// Sends a heartbeat. The status says whether the master requests a remount.
    pub(crate) async fn ping(&self) -> Result<ClientStatus, RpcError> {
        let arguments = ClientArguments { client_id: self.client_id };
        let response =
            self.master.call_with_attachment::<Ping, &str>(&arguments, self.attachment()).await??;
        Ok(response.client_status)
    }

    /// Attachment for Moongate masters; Mooncake's ignore it.
    fn attachment(&self) -> &'static [u8] {
        match (self.survives_restart(), self.drain.is_set()) {
            (true, true) => NODE_DRAINED,
            (true, false) => MEMORY_RETAINED,
            (false, _) if self.heartbeats_only => HEARTBEATS_ONLY,
            (false, _) => &[],
        }
    }

    /// Whether the next process restores all segments and sockets, so that readers may wait for it.
    pub(crate) fn survives_restart(&self) -> bool {
        self.sockets_persist && self.pool.segments().iter().all(|segment| segment.is_persistent)
    }

    fn segment(&self, segment: &MountedSegment) -> Segment<&str> {
        Segment {
            id: segment.id,
            name: &self.endpoint,
            base: segment.base,
            size: segment.size,
            te_endpoint: &self.endpoint,
            protocol: self.protocol,
            host_id: &self.host,
            locality: None,
        }
    }
}
