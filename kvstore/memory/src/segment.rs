//! Opens a segment, a region with its ledger, from its backing.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::PageMode;
use crate::catalog;
use crate::holder::{self, HolderClient};
use crate::ledger::{self, Ledger, OpenedLedger, SegmentIdentity, bytes_for};
use crate::memfd::{self, memfd};
use crate::numa::NumaPlacement;
use crate::region::{self, MappedRegion};
use crate::scrub::Scrubber;

/// Backing of a segment's memory.
#[derive(Debug, Clone)]
pub enum SegmentBacking {
    /// Private memory, freed when the process ends.
    Process,
    /// A holder process, as long as it runs.
    Holder(HolderClient),
    /// Files in a folder: a memory-backed volume, or a disk.
    Folder(PathBuf),
}

/// Options of a segment to open.
#[derive(Debug, Clone)]
pub struct SegmentOptions {
    /// Backing of the segment's memory.
    pub backing: SegmentBacking,
    /// Name at the backing, not the master's name.
    pub label: String,
    /// Length of the segment in bytes.
    pub size: u64,
    /// Page mode of new memory. Files use the pages of their file system.
    pub pages: PageMode,
    /// NUMA placement of new pages.
    pub placement: NumaPlacement,
    /// Whether peers write to the memory directly, over RDMA, so that the ledger cannot record which ranges are complete.
    pub direct_writes: bool,
}

/// An open segment: memory that peers write to, and its ledger.
#[derive(Debug)]
pub struct SegmentMemory {
    pub region: Arc<MappedRegion>,
    /// Ledger of complete ranges, with the segment's identity.
    pub ledger: Arc<Ledger>,
    /// Whether it was restored with existing content.
    pub is_restored: bool,
    /// Descriptor of the memory, for other processes of the host to map. `None` if its length is not sealed.
    pub fd: Option<OwnedFd>,
}

/// Why a segment cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The memory cannot be mapped.
    #[error(transparent)]
    Region(#[from] region::RegionError),
    /// The ledger cannot be opened.
    #[error(transparent)]
    Ledger(#[from] ledger::LedgerError),
    /// The holder returned an error.
    #[error(transparent)]
    Holder(#[from] holder::HolderError),
    /// A file cannot be used.
    #[error("cannot use {path}: {problem}", path = path.display())]
    File {
        path: PathBuf,
        /// Error of the operating system.
        problem: io::Error,
    },
}

/// Descriptors of memory and ledger, and whether either is new.
struct SegmentFds {
    memory: OwnedFd,
    ledger: OwnedFd,
    is_new: bool,
}

impl SegmentMemory {
    /// Opens a segment with its content, or creates a new one. `identity` is called with the base address for a new segment. A segment of
    /// another size, or with other [`SegmentOptions::direct_writes`], is dropped and recreated.
    ///
    /// # Errors
    /// When it is in use by another process, or not enough memory is available.
    pub fn open(
        options: &SegmentOptions,
        identity: impl FnOnce(u64) -> SegmentIdentity,
    ) -> Result<Self, SegmentError> {
        let fds = match &options.backing {
            SegmentBacking::Process => SegmentFds {
                memory: new_memfd(&options.label, options.size, options.pages)?,
                ledger: new_memfd(&options.label, bytes_for(options.size), PageMode::Normal)?,
                is_new: true,
            },
            SegmentBacking::Holder(holder) => from_holder(holder, options)?,
            SegmentBacking::Folder(folder) => from_folder(folder, options)?,
        };
        let opened = match Ledger::open(&fds.ledger, options.size)? {
            OpenedLedger::Existing(ledger) if !fds.is_new && is_compatible(options, &ledger) => {
                Self::restore(options, fds.memory, ledger)
            }
            // Entries without their memory, or memory without its entries, are useless.
            OpenedLedger::Existing(ledger) => Self::create(options, fds.memory, ledger.wipe(), identity),
            OpenedLedger::Empty(empty) => Self::create(options, fds.memory, empty, identity),
        }?;
        opened.open_catalog(options);
        Ok(opened)
    }

    /// Opens the object catalog. A segment works without one, but its objects cannot be restored to a master that has lost its log.
    fn open_catalog(&self, options: &SegmentOptions) {
        if options.direct_writes {
            return;
        }
        let opened = match &options.backing {
            SegmentBacking::Process => return,
            SegmentBacking::Holder(holder) => catalog_of_holder(holder, options),
            SegmentBacking::Folder(folder) => {
                let path = folder.join(format!("{}.objects", options.label));
                open_sized(path, catalog::bytes_for(options.size)).map(|(memory, _)| memory)
            }
        };
        match opened.and_then(|memory| Ok(self.ledger.open_catalog(memory)?)) {
            Ok(counts) if counts == catalog::CatalogCounts::default() => {}
            Ok(counts) => tracing::info!(
                objects = counts.objects,
                stale = counts.stale,
                damaged = counts.damaged,
                "opened the segment's object catalog"
            ),
            Err(error) => tracing::warn!(
                %error,
                "cannot open the object catalog: a master that loses its log cannot restore this segment's objects"
            ),
        }
    }

    /// Maps memory of another process: `size` bytes of a file from byte `from` on, which must be page-aligned. The ledger ends with this
    /// process.
    ///
    /// # Errors
    /// When the file is too short, or cannot be mapped.
    pub fn from_file(
        file: File,
        from: u64,
        size: u64,
        direct_writes: bool,
        identity: impl FnOnce(u64) -> SegmentIdentity,
    ) -> Result<Self, SegmentError> {
        let region = MappedRegion::part(file.into(), from, size, None)?;
        let ledger = match Ledger::open(new_memfd("shared.ledger", bytes_for(size), PageMode::Normal)?, size)?
        {
            OpenedLedger::Empty(empty) => empty,
            OpenedLedger::Existing(ledger) => ledger.wipe(),
        };
        let ledger = ledger.start(identity(region.base()), direct_writes)?;
        Ok(Self { region: Arc::new(region), ledger: Arc::new(ledger), is_restored: false, fd: None })
    }

    fn restore(options: &SegmentOptions, memory: OwnedFd, ledger: Ledger) -> Result<Self, SegmentError> {
        let SegmentIdentity { name, base, .. } = ledger.identity();
        let fd = sealed_fd(&memory);
        let region = map(options, memory, Some(base))?;
        if !ledger.same_boot() {
            tracing::info!("{name}: the machine was rebooted, verifying {} bytes", ledger.counts().bytes);
            let damaged = Scrubber::run_full(&ledger, &region).damaged;
            if !damaged.is_empty() {
                tracing::warn!("{name}: dropped {} ranges that had not reached the disk", damaged.len());
            }
            ledger.mark_verified()?;
        }
        let counts = ledger.counts();
        if ledger.has_direct_writes() {
            tracing::info!("{name}: restored {} bytes, which peers write over RDMA", options.size);
        } else {
            tracing::info!(
                "{name}: restored {} ranges, {} of {} bytes",
                counts.entries,
                counts.bytes,
                options.size
            );
        }
        Ok(Self { region: Arc::new(region), ledger: Arc::new(ledger), is_restored: true, fd })
    }

    fn create(
        options: &SegmentOptions,
        memory: OwnedFd,
        empty: ledger::EmptyLedger,
        identity: impl FnOnce(u64) -> SegmentIdentity,
    ) -> Result<Self, SegmentError> {
        let fd = sealed_fd(&memory);
        let region = map(options, memory, None)?;
        region.set_placement(options.placement);
        let ledger = empty.start(identity(region.base()), options.direct_writes)?;
        Ok(Self { region: Arc::new(region), ledger: Arc::new(ledger), is_restored: false, fd })
    }
}

/// A second descriptor of memory whose length is sealed.
fn sealed_fd(memory: &OwnedFd) -> Option<OwnedFd> {
    memfd::has_sealed_length(memory).then(|| memory.try_clone().ok()).flatten()
}

/// Whether the segment's content can be used with the options. A ledger says nothing about direct writes, and without a ledger
/// nothing says which ranges a process without them wrote.
fn is_compatible(options: &SegmentOptions, ledger: &Ledger) -> bool {
    let is_same = ledger.has_direct_writes() == options.direct_writes;
    if !is_same {
        let change = if options.direct_writes { "turned on" } else { "turned off" };
        tracing::warn!("{}: RDMA was {change}; the segment's content is dropped", ledger.identity().name);
    }
    is_same
}

fn map(
    options: &SegmentOptions,
    memory: OwnedFd,
    address: Option<u64>,
) -> Result<MappedRegion, SegmentError> {
    let mut region = MappedRegion::from_fd(memory, options.size, address)?;
    if region.pages() != PageMode::Huge && options.pages != PageMode::Normal {
        region.set_pages(PageMode::Transparent);
    }
    Ok(region)
}

fn new_memfd(label: &str, len: u64, pages: PageMode) -> Result<OwnedFd, SegmentError> {
    let created = memfd(label, len, pages);
    let (fd, _) = created.map_err(|problem| region::RegionError::Io {
        what: format!("create {len} bytes of memory"),
        problem,
    })?;
    Ok(fd)
}

fn from_holder(holder: &HolderClient, options: &SegmentOptions) -> Result<SegmentFds, SegmentError> {
    let names = [options.label.clone(), format!("{}.ledger", options.label)];
    let take = || -> Result<SegmentFds, holder::HolderError> {
        let [memory, ledger] = &names;
        let memory = holder.memory(memory, options.size, options.pages)?;
        let ledger = holder.memory(ledger, bytes_for(options.size), PageMode::Normal)?;
        Ok(SegmentFds { is_new: memory.is_new || ledger.is_new, memory: memory.fd, ledger: ledger.fd })
    };
    match take() {
        Err(holder::HolderError::Length { held, requested }) => {
            tracing::warn!(
                "{}: size changed from {held} to {requested} bytes; recreating the segment",
                options.label
            );
            names.iter().try_for_each(|name| holder.release(name))?;
            Ok(take()?)
        }
        result => Ok(result?),
    }
}

fn catalog_of_holder(holder: &HolderClient, options: &SegmentOptions) -> Result<OwnedFd, SegmentError> {
    let (name, len) = (format!("{}.objects", options.label), catalog::bytes_for(options.size));
    match holder.memory(&name, len, PageMode::Normal) {
        Err(holder::HolderError::Length { .. }) => {
            holder.release(&name)?;
            Ok(holder.memory(&name, len, PageMode::Normal)?.fd)
        }
        result => Ok(result?.fd),
    }
}

fn from_folder(folder: &Path, options: &SegmentOptions) -> Result<SegmentFds, SegmentError> {
    let (memory, memory_exists) =
        open_sized(folder.join(format!("{}.segment", options.label)), options.size)?;
    let (ledger, ledger_exists) =
        open_sized(folder.join(format!("{}.ledger", options.label)), bytes_for(options.size))?;
    Ok(SegmentFds { memory, ledger, is_new: !memory_exists || !ledger_exists })
}

/// Opens a file of this length; returns whether it existed with it.
fn open_sized(path: PathBuf, len: u64) -> Result<(OwnedFd, bool), SegmentError> {
    let open = || -> io::Result<(OwnedFd, bool)> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        let found = file.metadata()?.len();
        if found != len {
            // Never truncate the file: a process that still has it mapped would be killed. Replace it instead.
            if found != 0 {
                tracing::warn!(
                    "{}: size changed from {found} to {len} bytes; recreating the file",
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
