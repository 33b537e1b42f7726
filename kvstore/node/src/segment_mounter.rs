//! Mounts further segments while the node runs, and unmounts them.

use std::sync::Arc;

use mooncake_wire::types::Uuid;
use moongate_memory::numa::NumaPlacement;
use moongate_memory::{PageMode, SegmentBacking, SegmentMemory, SegmentOptions};
use moongate_rdma::RdmaFabric;

use crate::descriptor_publisher::DescriptorPublisher;
use crate::membership::NodeMembership;
use crate::memory::{new_identity, uuid};
use crate::segment_pool::MountedSegment;

/// Maximum number of segments, including those that the REST API mounts.
const MAX_SEGMENTS: usize = 256;

/// Adds segments to the node's memory, its descriptor and the store, and removes them.
#[derive(Clone)]
pub(crate) struct SegmentMounter {
    pub(crate) membership: NodeMembership,
    pub(crate) publisher: DescriptorPublisher,
    /// Devices with which memory is registered, if the node serves RDMA.
    pub(crate) fabric: Option<Arc<RdmaFabric>>,
}

impl SegmentMounter {
    /// Checks that the machine has memory for this many bytes on top of the mounted segments.
    pub(crate) fn check_capacity(&self, size: u64) -> Result<(), String> {
        let pool = &self.membership.pool;
        if pool.segments().len() >= MAX_SEGMENTS {
            return Err(format!("this node has {MAX_SEGMENTS} segments already, which is the limit"));
        }
        let limit = moongate_runtime::memory_limit()
            .ok_or("cannot read this machine's memory size from /proc/meminfo")?;
        let mounted = pool.bytes();
        if mounted.checked_add(size).is_none_or(|sum| sum > limit) {
            return Err(format!(
                "{size} bytes plus the {mounted} mounted bytes exceed the {limit} bytes of memory of this machine or container"
            ));
        }
        Ok(())
    }

    /// Allocates and mounts a further segment, which is lost when the process exits.
    pub(crate) async fn mount_process_memory(&self, size: u64) -> Result<Uuid, String> {
        self.check_capacity(size)?;
        let options = SegmentOptions {
            backing: SegmentBacking::Process,
            label: "more".to_owned(),
            size,
            pages: PageMode::Normal,
            placement: NumaPlacement::default(),
        };
        let opened = SegmentMemory::open(&options, |base| new_identity(base, size));
        self.mount_segment(opened.map_err(|error| error.to_string())?).await
    }

    /// Mounts a segment that is unmounted when the process exits.
    pub(crate) async fn mount_segment(&self, segment: SegmentMemory) -> Result<Uuid, String> {
        let identity = segment.ledger.identity();
        let registered = self.fabric.as_ref().map(|fabric| fabric.register(&segment.region)).transpose();
        let registered = registered.map_err(|error| error.to_string())?;
        let mounted =
            MountedSegment::new(segment, uuid(identity.segment), identity.base, false).with_rdma(registered);
        let mounted = Arc::new(mounted);
        if !self.membership.pool.add(Arc::clone(&mounted)) {
            return Err("its addresses overlap those of another segment; try again".to_owned());
        }
        self.publisher.update_descriptor(&self.membership);
        let registration = async {
            self.publisher.publish().await.map_err(|error| error.to_string())?;
            self.membership.mount(&mounted).await.map_err(|error| error.to_string())
        };
        if let Err(error) = registration.await {
            self.membership.pool.remove(mounted.id);
            self.publisher.update_descriptor(&self.membership);
            return Err(error);
        }
        Ok(mounted.id)
    }

    /// Unmounts a segment from the store, and removes it from the descriptor.
    pub(crate) async fn unmount(&self, id: Uuid) -> Result<(), String> {
        if self.membership.pool.segments().iter().all(|mounted| mounted.id != id) {
            return Err(format!("this node has no segment {id}"));
        }
        self.membership.unmount(id).await.map_err(|error| error.to_string())?;
        self.membership.pool.remove(id);
        self.publisher.update_descriptor(&self.membership);
        self.publisher.publish().await.map_err(|error| error.to_string())
    }

    /// Parses the id of a segment and unmounts it.
    pub(crate) async fn unmount_named(&self, id: &str) -> Result<(), String> {
        self.unmount(id.parse::<Uuid>().map_err(|problem| problem.to_string())?).await
    }
}
