//! A region and its ledger, from wherever they are kept.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog;
use crate::holder::{self, Holder};
use crate::ledger::{self, Identity, Ledger, Opened, bytes_for};
use crate::numa::Placement;
use crate::region::{self, Region};
use crate::scrub::Scrubber;
use crate::{Pages, memfd};

/// Where a segment's memory is kept.
#[derive(Debug, Clone)]
pub enum Keep {
    /// In this process: gone when it ends.
    Process,
    /// By a holder, as long as that runs.
    Holder(Holder),
    /// In files of a folder: a memory-backed volume, or a disk.
    Folder(PathBuf),
}

/// A segment to be opened.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Where it is kept.
    pub keep: Keep,
    /// Its name there; not the one that the master knows.
    pub label: String,
    /// Its length in bytes.
    pub size: u64,
    /// Pages of new memory. Files have those of their file system.
    pub pages: Pages,
    /// Memory nodes of new pages.
    pub placement: Placement,
}

/// Memory that peers write to, and what is known about it.
#[derive(Debug)]
pub struct Segment {
    /// The memory.
    pub region: Arc<Region>,
    /// Which parts are whole, and what the segment is.
    pub ledger: Arc<Ledger>,
    /// Whether it was there before, with what it holds.
    pub kept: bool,
}

/// Why a segment cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its memory.
    #[error(transparent)]
    Region(#[from] region::Error),
    /// Its ledger.
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
    /// The holder.
    #[error(transparent)]
    Holder(#[from] holder::Error),
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
struct Kept {
    memory: OwnedFd,
    ledger: OwnedFd,
    fresh: bool,
}

impl Segment {
    /// Opens it with what it holds, or begins a new one. `identity` is asked for a new one's, and given its address. A segment that
    /// is kept with another size is dropped, and begun anew.
    ///
    /// # Errors
    /// When it is in use by another process, or there is not as much memory.
    pub fn open(wanted: &Wanted, identity: impl FnOnce(u64) -> Identity) -> Result<Self, Error> {
        let kept = match &wanted.keep {
            Keep::Process => Kept {
                memory: fresh(&wanted.label, wanted.size, wanted.pages)?,
                ledger: fresh(&wanted.label, bytes_for(wanted.size), Pages::Normal)?,
                fresh: true,
            },
            Keep::Holder(holder) => from_holder(holder, wanted)?,
            Keep::Folder(folder) => from_folder(folder, wanted)?,
        };
        let opened = match Ledger::open(&kept.ledger, wanted.size)? {
            Opened::Kept(ledger) if !kept.fresh => Self::go_on(wanted, kept.memory, ledger),
            // Entries without their memory, or memory without its entries, are worth nothing.
            Opened::Kept(ledger) => Self::begin(wanted, kept.memory, ledger.wipe(), identity),
            Opened::Empty(blank) => Self::begin(wanted, kept.memory, blank, identity),
        }?;
        opened.open_catalog(wanted);
        Ok(opened)
    }

    /// Opens the catalog of objects beside the ledger. A segment without one serves as well; only a master that has lost its log
    /// cannot be offered what it holds.
    fn open_catalog(&self, wanted: &Wanted) {
        let opened = match &wanted.keep {
            Keep::Process => return,
            Keep::Holder(holder) => catalog_of_holder(holder, wanted),
            Keep::Folder(folder) => {
                let path = folder.join(format!("{}.objects", wanted.label));
                sized(path, catalog::bytes_for(wanted.size)).map(|(memory, _)| memory)
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
    pub fn of_file(
        file: File,
        from: u64,
        size: u64,
        identity: impl FnOnce(u64) -> Identity,
    ) -> Result<Self, Error> {
        let region = Region::part(file.into(), from, size, None)?;
        let ledger = match Ledger::open(fresh("shared.ledger", bytes_for(size), Pages::Normal)?, size)? {
            Opened::Empty(blank) => blank,
            Opened::Kept(ledger) => ledger.wipe(),
        };
        let ledger = ledger.start(identity(region.base()))?;
        Ok(Self { region: Arc::new(region), ledger: Arc::new(ledger), kept: false })
    }

    fn go_on(wanted: &Wanted, memory: OwnedFd, ledger: Ledger) -> Result<Self, Error> {
        let Identity { name, base, .. } = ledger.identity();
        let region = map(wanted, memory, Some(base))?;
        if !ledger.same_boot() {
            tracing::info!(
                "{name}: the machine was started anew, so {} bytes are checked",
                ledger.counts().bytes
            );
            let damaged = Scrubber::all(&ledger, &region).damaged;
            if !damaged.is_empty() {
                tracing::warn!("{name}: {} parts had not reached the disk, and are dropped", damaged.len());
            }
            ledger.checked()?;
        }
        let counts = ledger.counts();
        tracing::info!(
            "{name}: going on with {} parts, {} of {} bytes",
            counts.entries,
            counts.bytes,
            wanted.size
        );
        Ok(Self { region: Arc::new(region), ledger: Arc::new(ledger), kept: true })
    }

    fn begin(
        wanted: &Wanted,
        memory: OwnedFd,
        blank: ledger::Blank,
        identity: impl FnOnce(u64) -> Identity,
    ) -> Result<Self, Error> {
        let region = map(wanted, memory, None)?;
        region.place(wanted.placement);
        let ledger = blank.start(identity(region.base()))?;
        Ok(Self { region: Arc::new(region), ledger: Arc::new(ledger), kept: false })
    }
}

fn map(wanted: &Wanted, memory: OwnedFd, at: Option<u64>) -> Result<Region, Error> {
    let mut region = Region::from_fd(memory, wanted.size, at)?;
    if region.pages() != Pages::Huge && wanted.pages != Pages::Normal {
        region.set_pages(Pages::Transparent);
    }
    Ok(region)
}

fn fresh(label: &str, len: u64, pages: Pages) -> Result<OwnedFd, Error> {
    let made = memfd(label, len, pages);
    let (fd, _) =
        made.map_err(|problem| region::Error::Io { what: format!("make {len} bytes of memory"), problem })?;
    Ok(fd)
}

fn from_holder(holder: &Holder, wanted: &Wanted) -> Result<Kept, Error> {
    let names = [wanted.label.clone(), format!("{}.ledger", wanted.label)];
    let take = || -> Result<Kept, holder::Error> {
        let [memory, ledger] = &names;
        let memory = holder.memory(memory, wanted.size, wanted.pages)?;
        let ledger = holder.memory(ledger, bytes_for(wanted.size), Pages::Normal)?;
        Ok(Kept { fresh: memory.fresh || ledger.fresh, memory: memory.fd, ledger: ledger.fd })
    };
    match take() {
        Err(holder::Error::Length { kept, asked }) => {
            tracing::warn!("{}: {kept} bytes were kept and {asked} are wanted: beginning anew", wanted.label);
            names.iter().try_for_each(|name| holder.forget(name))?;
            Ok(take()?)
        }
        taken => Ok(taken?),
    }
}

fn catalog_of_holder(holder: &Holder, wanted: &Wanted) -> Result<OwnedFd, Error> {
    let (name, len) = (format!("{}.objects", wanted.label), catalog::bytes_for(wanted.size));
    match holder.memory(&name, len, Pages::Normal) {
        Err(holder::Error::Length { .. }) => {
            holder.forget(&name)?;
            Ok(holder.memory(&name, len, Pages::Normal)?.fd)
        }
        taken => Ok(taken?.fd),
    }
}

fn from_folder(folder: &Path, wanted: &Wanted) -> Result<Kept, Error> {
    let (memory, old) = sized(folder.join(format!("{}.segment", wanted.label)), wanted.size)?;
    let (ledger, known) = sized(folder.join(format!("{}.ledger", wanted.label)), bytes_for(wanted.size))?;
    Ok(Kept { memory, ledger, fresh: !old || !known })
}

/// A file of this length, and whether it was there with it.
fn sized(path: PathBuf, len: u64) -> Result<(OwnedFd, bool), Error> {
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
    open().map_err(|problem| Error::File { path: path.clone(), problem })
}
