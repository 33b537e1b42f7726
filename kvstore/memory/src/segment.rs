//! A region and its ledger, from wherever they are kept.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog;
use crate::holder::{self, HolderClient};
use crate::ledger::{self, Ledger, OpenedLedger, SegmentIdentity, bytes_for};
use crate::numa::NumaPlacement;
use crate::region::{self, MappedRegion};
use crate::scrub::Scrubber;
use crate::{PageMode, memfd};

/// Where a segment's memory is kept.
#[derive(Debug, Clone)]
pub enum SegmentBacking {
    /// In this process: gone when it ends.
    Process,
    /// By a holder, as long as that runs.
    Holder(HolderClient),
    /// In files of a folder: a memory-backed volume, or a disk.
    Folder(PathBuf),
}

/// A segment to be opened.
#[derive(Debug, Clone)]
pub struct SegmentOptions {
    /// Where it is kept.
    pub backing: SegmentBacking,
    /// Its name there; not the one that the master knows.
    pub label: String,
    /// Its length in bytes.
    pub size: u64,
    /// Pages of new memory. Files have those of their file system.
    pub pages: PageMode,
    /// Memory nodes of new pages.
    pub placement: NumaPlacement,
}

/// Memory that peers write to, and what is known about it.
#[derive(Debug)]
pub struct SegmentMemory {
    /// The memory.
    pub region: Arc<MappedRegion>,
    /// Which parts are whole, and what the segment is.
    pub ledger: Arc<Ledger>,
    /// Whether it was there before, with what it holds.
    pub is_restored: bool,
}

/// Why a segment cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// Its memory.
    #[error(transparent)]
    Region(#[from] region::RegionError),
    /// Its ledger.
    #[error(transparent)]
    Ledger(#[from] ledger::LedgerError),
    /// The holder.
    #[error(transparent)]
    Holder(#[from] holder::HolderError),
    /// Files.
    #[error("cannot use {path}: {problem}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        problem: io::Error,
    },
}

/// The two descriptors, and whether either is new.
struct SegmentFds {
    memory: OwnedFd,
    ledger: OwnedFd,
    is_new: bool,
}

impl SegmentMemory {
    /// Opens it with what it holds, or begins a new one. `identity` is asked for a new one's, and given its address. A segment that
    /// is kept with another size is dropped, and begun anew.
    ///
    /// # Errors
    /// When it is in use by another process, or there is not as much memory.
    pub fn open(
        wanted: &SegmentOptions,
        identity: impl FnOnce(u64) -> SegmentIdentity,
    ) -> Result<Self, SegmentError> {
        let kept = match &wanted.backing {
            SegmentBacking::Process => SegmentFds {
                memory: new_memfd(&wanted.label, wanted.size, wanted.pages)?,
                ledger: new_memfd(&wanted.label, bytes_for(wanted.size), PageMode::Normal)?,
                is_new: true,
            },
            SegmentBacking::Holder(holder) => from_holder(holder, wanted)?,
            SegmentBacking::Folder(folder) => from_folder(folder, wanted)?,
        };
        let opened = match Ledger::open(&kept.ledger, wanted.size)? {
            OpenedLedger::Existing(ledger) if !kept.is_new => Self::restore(wanted, kept.memory, ledger),
            // Entries without their memory, or memory without its entries, are worth nothing.
            OpenedLedger::Existing(ledger) => Self::create(wanted, kept.memory, ledger.wipe(), identity),
            OpenedLedger::Empty(blank) => Self::create(wanted, kept.memory, blank, identity),
        }?;
        opened.open_catalog(wanted);
        Ok(opened)
    }

    /// Opens the catalog of objects beside the ledger. A segment without one serves as well; only a master that has lost its log
    /// cannot be offered what it holds.
    fn open_catalog(&self, wanted: &SegmentOptions) {
        let opened = match &wanted.backing {
            SegmentBacking::Process => return,
            SegmentBacking::Holder(holder) => catalog_of_holder(holder, wanted),
            SegmentBacking::Folder(folder) => {
                let path = folder.join(format!("{}.objects", wanted.label));
                open_sized(path, catalog::bytes_for(wanted.size)).map(|(memory, _)| memory)
            }
        };
        match opened.and_then(|memory| Ok(self.ledger.open_catalog(memory)?)) {
            Ok(counts) if counts == catalog::CatalogCounts::default() => {}
            Ok(counts) => tracing::info!(
                objects = counts.objects,
                stale = counts.stale,
                damaged = counts.damaged,
                "the segment's catalog of objects"
            ),
            Err(error) => tracing::warn!(
                %error,
                "no catalog of objects: a master that loses its log cannot restore this segment's objects"
            ),
        }
    }

    /// Memory of another process: `size` bytes of a file from the byte `from` on, which is the first of a page. What is known of it ends
    /// with this process.
    ///
    /// # Errors
    /// When there is not as much, or it cannot be mapped.
    pub fn from_file(
        file: File,
        from: u64,
        size: u64,
        identity: impl FnOnce(u64) -> SegmentIdentity,
    ) -> Result<Self, SegmentError> {
        let region = MappedRegion::part(file.into(), from, size, None)?;
        let ledger = match Ledger::open(new_memfd("shared.ledger", bytes_for(size), PageMode::Normal)?, size)?
        {
            OpenedLedger::Empty(blank) => blank,
            OpenedLedger::Existing(ledger) => ledger.wipe(),
        };
        let ledger = ledger.start(identity(region.base()))?;
        Ok(Self { region: Arc::new(region), ledger: Arc::new(ledger), is_restored: false })
    }

    fn restore(wanted: &SegmentOptions, memory: OwnedFd, ledger: Ledger) -> Result<Self, SegmentError> {
        let SegmentIdentity { name, base, .. } = ledger.identity();
        let region = map(wanted, memory, Some(base))?;
        if !ledger.same_boot() {
            tracing::info!(
                "{name}: the machine was started anew, so {} bytes are checked",
                ledger.counts().bytes
            );
            let damaged = Scrubber::run_full(&ledger, &region).damaged;
            if !damaged.is_empty() {
                tracing::warn!("{name}: {} parts had not reached the disk, and are dropped", damaged.len());
            }
            ledger.mark_verified()?;
        }
        let counts = ledger.counts();
        tracing::info!(
            "{name}: going on with {} parts, {} of {} bytes",
            counts.entries,
            counts.bytes,
            wanted.size
        );
        Ok(Self { region: Arc::new(region), ledger: Arc::new(ledger), is_restored: true })
    }

    fn create(
        wanted: &SegmentOptions,
        memory: OwnedFd,
        blank: ledger::EmptyLedger,
        identity: impl FnOnce(u64) -> SegmentIdentity,
    ) -> Result<Self, SegmentError> {
        let region = map(wanted, memory, None)?;
        region.set_placement(wanted.placement);
        let ledger = blank.start(identity(region.base()))?;
        Ok(Self { region: Arc::new(region), ledger: Arc::new(ledger), is_restored: false })
    }
}

fn map(wanted: &SegmentOptions, memory: OwnedFd, at: Option<u64>) -> Result<MappedRegion, SegmentError> {
    let mut region = MappedRegion::from_fd(memory, wanted.size, at)?;
    if region.pages() != PageMode::Huge && wanted.pages != PageMode::Normal {
        region.set_pages(PageMode::Transparent);
    }
    Ok(region)
}

fn new_memfd(label: &str, len: u64, pages: PageMode) -> Result<OwnedFd, SegmentError> {
    let made = memfd(label, len, pages);
    let (fd, _) = made.map_err(|problem| region::RegionError::Io {
        what: format!("make {len} bytes of memory"),
        problem,
    })?;
    Ok(fd)
}

fn from_holder(holder: &HolderClient, wanted: &SegmentOptions) -> Result<SegmentFds, SegmentError> {
    let names = [wanted.label.clone(), format!("{}.ledger", wanted.label)];
    let take = || -> Result<SegmentFds, holder::HolderError> {
        let [memory, ledger] = &names;
        let memory = holder.memory(memory, wanted.size, wanted.pages)?;
        let ledger = holder.memory(ledger, bytes_for(wanted.size), PageMode::Normal)?;
        Ok(SegmentFds { is_new: memory.is_new || ledger.is_new, memory: memory.fd, ledger: ledger.fd })
    };
    match take() {
        Err(holder::HolderError::Length { held: kept, requested: asked }) => {
            tracing::warn!("{}: {kept} bytes were kept and {asked} are wanted: beginning anew", wanted.label);
            names.iter().try_for_each(|name| holder.release(name))?;
            Ok(take()?)
        }
        taken => Ok(taken?),
    }
}

fn catalog_of_holder(holder: &HolderClient, wanted: &SegmentOptions) -> Result<OwnedFd, SegmentError> {
    let (name, len) = (format!("{}.objects", wanted.label), catalog::bytes_for(wanted.size));
    match holder.memory(&name, len, PageMode::Normal) {
        Err(holder::HolderError::Length { .. }) => {
            holder.release(&name)?;
            Ok(holder.memory(&name, len, PageMode::Normal)?.fd)
        }
        taken => Ok(taken?.fd),
    }
}

fn from_folder(folder: &Path, wanted: &SegmentOptions) -> Result<SegmentFds, SegmentError> {
    let (memory, old) = open_sized(folder.join(format!("{}.segment", wanted.label)), wanted.size)?;
    let (ledger, known) =
        open_sized(folder.join(format!("{}.ledger", wanted.label)), bytes_for(wanted.size))?;
    Ok(SegmentFds { memory, ledger, is_new: !old || !known })
}

/// A file of this length, and whether it was there with it.
fn open_sized(path: PathBuf, len: u64) -> Result<(OwnedFd, bool), SegmentError> {
    let open = || -> io::Result<(OwnedFd, bool)> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        let found = file.metadata()?.len();
        if found != len {
            // Never cut short: a process that still has it mapped would die of it. It is let go instead.
            if found != 0 {
                tracing::warn!(
                    "{}: {found} bytes were kept and {len} are wanted: beginning anew",
                    path.display()
                );
                std::fs::remove_file(&path)?;
                let file = File::options().read(true).write(true).create_new(true).open(&path)?;
                region::reserve(&file, len)?;
                return Ok((file.into(), false));
            }
            region::reserve(&file, len)?;
        }
        Ok((file.into(), found == len))
    };
    open().map_err(|problem| SegmentError::File { path: path.clone(), problem })
}
