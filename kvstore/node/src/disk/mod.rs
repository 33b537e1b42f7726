//! A tier on a disk: what has no room in memory goes there as the master asks, is read from there, and comes back.

mod keeper;
mod offload;
mod promote;
mod serve;
mod staging;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use moongate_memory::{Pages, Region};
use moongate_tier::Tier;

pub(crate) use keeper::Keeper;
pub(crate) use serve::{Readers, listen};

use crate::config::Config;
use crate::error::StartError;
use crate::flags::Flags;
use staging::Staging;

/// A node's tier.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) tier: Arc<Tier>,
    /// Bytes of its file.
    pub(crate) capacity: u64,
    pub(crate) counts: DiskCounts,
    staging: Staging,
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

impl Disk {
    /// Opens the tier, if the configuration wants one. Reads what is known about each of its blocks.
    ///
    /// # Errors
    /// [`StartError::Disk`] and [`StartError::Buffer`].
    pub(crate) async fn open(flags: &Flags, config: &Config) -> Result<Option<Arc<Self>>, StartError> {
        if !config.ssd_offload {
            return Ok(None);
        }
        let folder = config.ssd_path.as_ref().ok_or(StartError::NoDiskPath)?;
        let capacity = flags.tier_size.ok_or(StartError::NoDiskSize)?;
        let options =
            moongate_tier::Options::new(folder.join(format!("{}.tier", flags.memory_label)), capacity);
        let region = Region::anonymous(flags.tier_buffer, Pages::Normal)?;
        let opened = tokio::task::spawn_blocking(move || {
            // The file is made if it is missing, and so is its folder.
            if let Some(folder) = options.path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            Ok::<_, StartError>(Tier::open(&options)?)
        });
        let tier = Arc::new(opened.await.map_err(std::io::Error::other)??);
        let counts = tier.counts();
        tracing::info!(
            capacity,
            objects = counts.objects,
            bytes = counts.bytes,
            kept = tier.kept(),
            "a tier on a disk"
        );
        let staging = Staging::new(Arc::new(region));
        Ok(Some(Arc::new(Self { tier, capacity, counts: DiskCounts::default(), staging })))
    }

    /// The memory that readers read from.
    pub(crate) fn buffer(&self) -> &Arc<Region> {
        self.staging.region()
    }
}
