//! A tier on a disk: what has no room in memory goes there as the master asks, is read from there, and comes back.

mod offload;
mod promote;
mod serve;
mod staging;
mod worker;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use moongate_memory::{MappedRegion, PageMode};
use moongate_tier::FileTier;

pub(crate) use serve::{DiskReadAccess, listen};
pub(crate) use worker::DiskWorker;

use crate::args::NodeArgs;
use crate::config::NodeConfig;
use crate::error::NodeStartError;
use staging::StagingBuffer;

/// A node's tier.
#[derive(Debug)]
pub(crate) struct NodeDisk {
    pub(crate) tier: Arc<FileTier>,
    /// Bytes of its file.
    pub(crate) capacity: u64,
    pub(crate) counts: DiskCounts,
    staging: StagingBuffer,
}

/// What has become of objects.
#[derive(Debug, Default)]
pub(crate) struct DiskCounts {
    /// Put on the disk.
    pub(crate) offloaded: AtomicU64,
    /// Should have been, and were not.
    pub(crate) not_offloaded: AtomicU64,
    /// Brought back into memory.
    pub(crate) promoted: AtomicU64,
    /// Should have been, and were not.
    pub(crate) not_promoted: AtomicU64,
    /// Brought into the buffer for readers.
    pub(crate) staged: AtomicU64,
    /// Readers who got nothing: there was no room, no such object, or it was damaged.
    pub(crate) not_staged: AtomicU64,
}

impl NodeDisk {
    /// Opens the tier, if the configuration wants one. Reads what is known about each of its blocks.
    ///
    /// # Errors
    /// [`NodeStartError::NodeDisk`] and [`NodeStartError::Buffer`].
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
            // The file is made if it is missing, and so is its folder.
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
            kept = tier.is_restored(),
            "a tier on a disk"
        );
        let staging = StagingBuffer::new(Arc::new(region));
        Ok(Some(Arc::new(Self { tier, capacity, counts: DiskCounts::default(), staging })))
    }

    /// The memory that readers read from.
    pub(crate) fn buffer(&self) -> &Arc<MappedRegion> {
        self.staging.region()
    }
}
