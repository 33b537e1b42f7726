//! Mounts further segments while the node runs, and unmounts them.

use std::sync::Arc;

use mooncake_wire::types::{ParseUuidError, Uuid};
use moongate_master_client::rpc::RpcError;
use moongate_memory::numa::NumaPlacement;
use moongate_memory::segment::SegmentError;
use moongate_memory::{PageMode, SegmentBacking, SegmentMemory, SegmentOptions};
use moongate_rdma::{RdmaFabric, RdmaSetupError};
use moongate_transfer::DirectoryError;

use crate::descriptor_publisher::DescriptorPublisher;
use crate::membership::NodeMembership;
use crate::memory::{new_identity, uuid};
use crate::segment_pool::MountedSegment;

/// Maximum number of segments, including those that the REST API mounts.
const MAX_SEGMENTS: usize = 256;

/// Why a segment was not mounted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SegmentMountError {
    #[error("this node has {MAX_SEGMENTS} segments already, which is the limit")]
    TooMany,
    #[error("cannot read this machine's memory size from /proc/meminfo")]
    UnknownMemorySize,
    #[error(
        "{size} bytes plus the {mounted} mounted bytes exceed the {limit} bytes of memory of this machine or container"
    )]
    TooLarge { size: u64, mounted: u64, limit: u64 },
    #[error("its addresses overlap those of another segment; try again")]
    Overlap,
    #[error(transparent)]
    Memory(#[from] SegmentError),
    #[error(transparent)]
    Rdma(#[from] RdmaSetupError),
    #[error(transparent)]
    Publish(#[from] DirectoryError),
    #[error(transparent)]
    Master(#[from] RpcError),
}

/// Why a segment was not unmounted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SegmentUnmountError {
    #[error(transparent)]
    InvalidId(#[from] ParseUuidError),
    #[error("this node has no segment {0}")]
    NotMounted(Uuid),
    #[error(transparent)]
    Master(#[from] RpcError),
    /// The segment is unmounted, but the descriptor still has it.
    #[error(transparent)]
    Publish(#[from] DirectoryError),
}

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
    pub(crate) fn check_capacity(&self, size: u64) -> Result<(), SegmentMountError> {
        let pool = &self.membership.pool;
        if pool.segments().len() >= MAX_SEGMENTS {
            return Err(SegmentMountError::TooMany);
        }
        let limit = moongate_runtime::memory_limit().ok_or(SegmentMountError::UnknownMemorySize)?;
        let mounted = pool.bytes();
        if mounted.checked_add(size).is_none_or(|sum| sum > limit) {
            return Err(SegmentMountError::TooLarge { size, mounted, limit });
        }
        Ok(())
    }

    /// Allocates and mounts a further segment, which is lost when the process exits.
    pub(crate) async fn mount_process_memory(&self, size: u64) -> Result<Uuid, SegmentMountError> {
        self.check_capacity(size)?;
        let options = SegmentOptions {
            backing: SegmentBacking::Process,
            label: "more".to_owned(),
            size,
            pages: PageMode::Normal,
            placement: NumaPlacement::default(),
            direct_writes: self.fabric.is_some(),
        };
        self.mount_segment(SegmentMemory::open(&options, |base| new_identity(base, size))?).await
    }

    /// Mounts a segment that is unmounted when the process exits.
    pub(crate) async fn mount_segment(&self, segment: SegmentMemory) -> Result<Uuid, SegmentMountError> {
        let identity = segment.ledger.identity();
        let registered = self.fabric.as_ref().map(|fabric| fabric.register(&segment.region)).transpose()?;
        let mounted =
            MountedSegment::new(segment, uuid(identity.segment), identity.base, false).with_rdma(registered);
        let mounted = Arc::new(mounted);
        if !self.membership.pool.add(Arc::clone(&mounted)) {
            return Err(SegmentMountError::Overlap);
        }
        self.publisher.update_descriptor(&self.membership);
        let registration = async {
            self.publisher.publish().await?;
            Ok(self.membership.mount(&mounted).await?)
        };
        if let Err(error) = registration.await {
            self.membership.pool.remove(mounted.id);
            self.publisher.update_descriptor(&self.membership);
            return Err(error);
        }
        Ok(mounted.id)
    }

    /// Unmounts a segment from the store, and removes it from the descriptor.
    pub(crate) async fn unmount(&self, id: Uuid) -> Result<(), SegmentUnmountError> {
        if self.membership.pool.segments().iter().all(|mounted| mounted.id != id) {
            return Err(SegmentUnmountError::NotMounted(id));
        }
        self.membership.unmount(id).await?;
        self.membership.pool.remove(id);
        self.publisher.update_descriptor(&self.membership);
        Ok(self.publisher.publish().await?)
    }

    /// Parses the id of a segment and unmounts it.
    pub(crate) async fn unmount_named(&self, id: &str) -> Result<(), SegmentUnmountError> {
        self.unmount(id.parse()?).await
    }
}
