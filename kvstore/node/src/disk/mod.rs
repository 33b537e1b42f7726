//! The disk tier: the master offloads objects from memory to it, readers read them from it, and hot ones are promoted to memory.

mod offload;
mod promote;
mod serve;
mod staging;
mod worker;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use moongate_memory::{MappedRegion, PageMode};
use moongate_tier::FileTier;

pub(crate) use serve::DiskReadAccess;
pub(crate) use worker::DiskWorker;

use crate::args::NodeArgs;
use crate::config::NodeConfig;
use crate::error::NodeStartError;
use staging::StagingBuffer;

/// A node's disk tier with its staging buffer.
#[derive(Debug)]
pub(crate) struct NodeDisk {
    pub(crate) tier: Arc<FileTier>,
    /// Size of the tier's file in bytes.
    pub(crate) capacity: u64,
    pub(crate) counts: DiskCounts,
    staging: StagingBuffer,
}

/// Counters of offloads, promotions and reads, in objects.
#[derive(Debug, Default)]
pub(crate) struct DiskCounts {
    pub(crate) offloaded: AtomicU64,
    pub(crate) not_offloaded: AtomicU64,
    pub(crate) promoted: AtomicU64,
    pub(crate) not_promoted: AtomicU64,
    /// Read requests that were loaded into the staging buffer.
    pub(crate) staged: AtomicU64,
    /// Read requests that failed: the buffer was full, or the object missing or damaged.
    pub(crate) not_staged: AtomicU64,
}

impl NodeDisk {
    /// Opens the tier if the configuration enables it. This reads the metadata of each block.
    ///
    /// # Errors
    /// [`NodeStartError::Disk`], [`NodeStartError::Buffer`], or a missing path or size.
    pub(crate) async fn open(
        flags: &NodeArgs,
        config: &NodeConfig,
    ) -> Result<Option<Arc<Self>>, NodeStartError> {
        if !config.ssd_offload {
            return Ok(None);
        }
        let folder = config.ssd_path.as_ref().ok_or(NodeStartError::NoDiskPath)?;
        let capacity = flags.tier_size.ok_or(NodeStartError::NoDiskSize)?;
        let options =
            moongate_tier::TierOptions::new(folder.join(format!("{}.tier", flags.memory_label)), capacity);
        let region = MappedRegion::anonymous(flags.tier_buffer, PageMode::Normal)?;
        let opened = tokio::task::spawn_blocking(move || {
            // FileTier::open creates a missing file, but not its folder.
            if let Some(folder) = options.path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            Ok::<_, NodeStartError>(FileTier::open(&options)?)
        });
        let tier = Arc::new(opened.await.map_err(std::io::Error::other)??);
        let counts = tier.counts();
        tracing::info!(
            capacity,
            objects = counts.objects,
            bytes = counts.bytes,
            restored = tier.is_restored(),
            "disk tier opened"
        );
        let staging = StagingBuffer::new(Arc::new(region));
        Ok(Some(Arc::new(Self { tier, capacity, counts: DiskCounts::default(), staging })))
    }

    /// The staging buffer from which readers read.
    pub(crate) fn buffer(&self) -> &Arc<MappedRegion> {
        self.staging.region()
    }
}
