//! A piece of mapped memory: reading, writing, checking.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use rustix::fs::FallocateFlags;
use rustix::mm::Advice;

use crate::checksum::Crc32c;
use crate::mapping::{MappedSpan, MemoryMapping};
use crate::numa::{self, NumaPlacement};
use crate::{PageMode, memfd};

/// Bytes copied out at a time to be checked.
const SCRATCH_BYTES: usize = 16 << 10;

/// Memory that peers write to and read from. Threads share it behind an `Arc`; who may write where, and when, is for its user to
/// decide: bytes that two write at the same time are a mixture, and nothing worse.
///
/// The shared kinds keep their bytes when the process ends, however it ends.
#[derive(Debug)]
pub struct MappedRegion {
    mapping: MemoryMapping,
    len: u64,
    pages: PageMode,
}

/// Why there is no region.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// No memory, or no file.
    #[error("cannot {what}: {problem}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system says.
        problem: io::Error,
    },
    /// What is there has another size.
    #[error("{path} has {found} bytes and {wanted} are asked for; ask for that many, or remove it and what it holds", path = path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The length asked for.
        wanted: u64,
    },
    /// Not a length that can be mapped.
    #[error("{0} bytes cannot be mapped")]
    Unmappable(u64),
}

/// A part was asked for that does not lie in the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at {offset} do not lie in a region of {size} bytes")]
pub struct OutOfRangeError {
    /// Where the part begins.
    pub offset: u64,
    /// Its length.
    pub len: u64,
    /// The region's length.
    pub size: u64,
}

impl From<OutOfRangeError> for io::Error {
    fn from(problem: OutOfRangeError) -> Self {
        Self::new(io::ErrorKind::InvalidInput, problem)
    }
}

impl MappedRegion {
    /// Memory of this process: gone when it ends.
    ///
    /// # Errors
    /// When the system has not as much. Too few huge pages are no error, see [`PageMode::Huge`].
    pub fn anonymous(len: u64, pages: PageMode) -> Result<Self, RegionError> {
        let size = mappable(len)?;
        if pages == PageMode::Huge {
            match MemoryMapping::anonymous(size, PageMode::Huge) {
                Ok(mapping) => return Ok(Self::new(mapping, len, PageMode::Huge)),
                Err(problem) => tracing::warn!(
                    "no huge pages for {len} bytes ({problem}); set vm.nr_hugepages. Taking transparent ones"
                ),
            }
        }
        let got = if pages == PageMode::Huge { PageMode::Transparent } else { pages };
        let mapping =
            MemoryMapping::anonymous(size, got).map_err(io_error(|| format!("map {len} bytes of memory")))?;
        Ok(Self::new(mapping, len, got))
    }

    /// A file's bytes, in a memory-backed volume or on a disk. It is made if it is missing; its space is taken at once, because a
    /// write to mapped memory that finds the disk full ends the process.
    ///
    /// # Errors
    /// [`RegionError::Length`] when it is there with another length; else as the file system says.
    pub fn file(path: &Path, len: u64) -> Result<Self, RegionError> {
        mappable(len)?;
        let shown = || path.display().to_string();
        let open = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let file = open.map_err(io_error(|| format!("open {}", shown())))?;
        let found = file.metadata().map_err(io_error(|| format!("look at {}", shown())))?.len();
        if found != 0 && found != len {
            return Err(RegionError::Length { path: path.to_owned(), found, wanted: len });
        }
        reserve(&file, len).map_err(io_error(|| format!("reserve {len} bytes for {}", shown())))?;
        Self::from_fd(file.into(), len, None)
    }

    /// New memory behind a file descriptor of its own, shared with whoever is given the descriptor too.
    ///
    /// # Errors
    /// When the system has not as much.
    pub fn shared(name: &str, len: u64, pages: PageMode) -> Result<(Self, OwnedFd), RegionError> {
        mappable(len)?;
        let (fd, got) =
            memfd(name, len, pages).map_err(io_error(|| format!("make {len} bytes of memory")))?;
        let mut region =
            Self::from_fd(fd.try_clone().map_err(io_error(|| "keep a descriptor".into()))?, len, None)?;
        region.set_pages(got);
        Ok((region, fd))
    }

    /// The first `len` bytes behind a file descriptor, mapped at the address `at` if that is free ([`MappedRegion::base`] tells). Without
    /// `at` an address is chosen that a later process will most likely find free again.
    ///
    /// Nothing is read: the time does not depend on the length.
    ///
    /// # Errors
    /// [`RegionError::Length`] when there is less; else as the system says.
    pub fn from_fd(fd: OwnedFd, len: u64, at: Option<u64>) -> Result<Self, RegionError> {
        Self::part(fd, 0, len, at)
    }

    /// [`MappedRegion::from_fd`] from the byte `from` on, which is the first of a page.
    ///
    /// # Errors
    /// As there.
    pub fn part(fd: OwnedFd, from: u64, len: u64, at: Option<u64>) -> Result<Self, RegionError> {
        let size = mappable(len)?;
        let stat = rustix::fs::fstat(&fd).map_err(io_error(|| "look at shared memory".into()))?;
        let found = u64::try_from(stat.st_size).unwrap_or(0);
        // Bytes beyond the end of a file cannot be touched, mapped or not.
        let wanted = from.saturating_add(len);
        if found < wanted {
            return Err(RegionError::Length { path: "shared memory".into(), found, wanted });
        }
        // Huge pages are mapped whole. They tell themselves by the size of a block.
        let page = usize::try_from(stat.st_blksize).unwrap_or(0);
        let huge = page > (1 << 20) && found.is_multiple_of(page as u64);
        let whole = if huge { crate::mapping::round_up_to_page(size, page) } else { Ok(size) };
        let mapping = whole.and_then(|size| MemoryMapping::shared(fd.as_fd(), from, size, at));
        let mapping = mapping.map_err(io_error(|| format!("map {len} bytes of shared memory")))?;
        if at.is_some_and(|at| at != mapping.base()) {
            tracing::info!(
                "shared memory that was at {:#x} is at {:#x} now",
                at.unwrap_or(0),
                mapping.base()
            );
        }
        Ok(Self::new(mapping, len, if huge { PageMode::Huge } else { PageMode::Normal }))
    }

    fn new(mapping: MemoryMapping, len: u64, pages: PageMode) -> Self {
        // Caches are of no use in a core file, and would make it the size of the machine.
        mapping.advise(Advice::LinuxDontDump);
        let mut region = Self { mapping, len, pages };
        region.set_pages(pages);
        region
    }

    /// Asks for larger pages from now on, where the kind of memory allows it.
    pub fn set_pages(&mut self, pages: PageMode) {
        if pages == PageMode::Transparent {
            self.mapping.advise(Advice::LinuxHugepage);
        }
        self.pages = pages;
    }

    /// Chooses the memory node for pages that have not been written yet, and tells in the log what came of it.
    pub fn set_placement(&self, placement: NumaPlacement) {
        let nodes = numa::nodes();
        if placement == NumaPlacement::Anywhere {
            return;
        }
        if let [only] = nodes[..] {
            tracing::info!("the machine has one memory node ({only}): nothing to place");
            return;
        }
        let span = usize::try_from(self.len).ok().and_then(|len| self.mapping.span(0, len));
        match span.map_or(Ok(()), |span| numa::place(span, placement)) {
            Ok(()) => {
                tracing::info!("{} bytes of memory are placed: {placement:?} of nodes {nodes:?}", self.len);
            }
            Err(problem) => {
                tracing::warn!("memory cannot be placed ({placement:?} of nodes {nodes:?}): {problem}");
            }
        }
    }

    /// Address of its first byte in this process.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.mapping.base()
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The pages that it got.
    #[must_use]
    pub fn pages(&self) -> PageMode {
        self.pages
    }

    /// Whether a part lies in it.
    ///
    /// # Errors
    /// When it does not.
    pub fn check(&self, offset: u64, len: u64) -> Result<(), OutOfRangeError> {
        self.span(offset, len).map(drop)
    }

    pub(crate) fn span(&self, offset: u64, len: u64) -> Result<MappedSpan<'_>, OutOfRangeError> {
        let problem = OutOfRangeError { offset, len, size: self.len };
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(problem);
        }
        let len = usize::try_from(len).map_err(|_| problem)?;
        self.mapping.span(offset, len).ok_or(problem)
    }

    /// A word that is changed at once; at a multiple of 8.
    pub(crate) fn word(&self, offset: u64) -> Result<&AtomicU64, OutOfRangeError> {
        self.span(offset, 8)?;
        self.mapping.word(offset).ok_or(OutOfRangeError { offset, len: 8, size: self.len })
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When they do not lie in it.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfRangeError> {
        self.span(offset, into.len() as u64)?.copy_to(into);
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When there is no room; then nothing was written.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), OutOfRangeError> {
        self.span(offset, from.len() as u64)?.copy_from(from);
        Ok(())
    }

    /// CRC-32C of a part.
    ///
    /// # Errors
    /// When it does not lie in the region.
    pub fn crc32c(&self, offset: u64, len: u64) -> Result<u32, OutOfRangeError> {
        let mut crc = Crc32c::new();
        self.update(&mut crc, offset, len)?;
        Ok(crc.value())
    }

    /// Takes a part into a checksum.
    pub(crate) fn update(&self, crc: &mut Crc32c, offset: u64, len: u64) -> Result<(), OutOfRangeError> {
        self.check(offset, len)?;
        // Copied first: a checksum reads a slice, and these bytes may change under it.
        let mut copy = [0; SCRATCH_BYTES];
        for piece in pieces(offset, len, SCRATCH_BYTES) {
            let copy = copy.get_mut(..piece.len).unwrap_or_default();
            self.read_at(piece.offset, copy)?;
            crc.update(copy);
        }
        Ok(())
    }
}

/// A part that is handled at once.
pub(crate) struct RegionChunk {
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

/// `len` bytes at `offset`, in pieces of at most `most` bytes.
pub(crate) fn pieces(offset: u64, len: u64, most: usize) -> impl Iterator<Item = RegionChunk> {
    (0..len.div_ceil(most as u64)).map(move |number| {
        let before = number * most as u64;
        let len = usize::try_from(len - before).map_or(most, |left| left.min(most));
        RegionChunk { offset: offset + before, len }
    })
}

fn mappable(len: u64) -> Result<usize, RegionError> {
    usize::try_from(len)
        .ok()
        .filter(|len| (1..=isize::MAX as usize).contains(len))
        .ok_or(RegionError::Unmappable(len))
}

/// Takes a file's space on its disk.
pub(crate) fn reserve(file: &File, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP) => {
            tracing::warn!("this file system cannot reserve space: when it is full, writes end the process");
            file.set_len(len)
        }
        Err(problem) => Err(problem.into()),
    }
}

fn io_error<E: Into<io::Error>>(what: impl FnOnce() -> String) -> impl FnOnce(E) -> RegionError {
    move |problem| RegionError::Io { what: what(), problem: problem.into() }
}
