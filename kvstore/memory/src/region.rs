//! A region of mapped memory, with bounds-checked access.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use rustix::fs::FallocateFlags;
use rustix::mm::Advice;

use crate::PageMode;
use crate::checksum::Crc32c;
use crate::mapping::{MappedSpan, MemoryMapping};
use crate::memfd::{self, memfd};
use crate::numa::{self, NumaPlacement};
use crate::populated::PopulatedParts;

/// Bytes copied at a time for a checksum.
const SCRATCH_BYTES: usize = 16 << 10;

/// Memory that peers write to and read from, shared by threads behind an `Arc`. Callers decide who may write where: concurrent writes to
/// the same bytes mix their data, without other effects.
///
/// Shared regions keep their bytes when the process ends for any reason.
#[derive(Debug)]
pub struct MappedRegion {
    mapping: MemoryMapping,
    len: u64,
    pages: PageMode,
    populated: PopulatedParts,
}

/// Why a region cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// Memory or a file is not available.
    #[error("cannot {what}: {problem}")]
    Io {
        what: String,
        /// Error of the operating system.
        problem: io::Error,
    },
    /// The existing memory has another size.
    #[error("{path} has {found} bytes, but {required} are configured; change the size, or delete the file with its content", path = path.display())]
    Length { path: PathBuf, found: u64, required: u64 },
    /// The length cannot be mapped.
    #[error("{0} bytes cannot be mapped")]
    Unmappable(u64),
    /// Another process could truncate the memory, and an access beyond its end would kill this process.
    #[error("the length of the shared memory is not sealed")]
    NotSealed,
}

/// A range is not within the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at {offset} are not within a region of {size} bytes")]
pub struct OutOfRangeError {
    /// Offset of the range in bytes.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
    /// Length of the region in bytes.
    pub size: u64,
}

impl From<OutOfRangeError> for io::Error {
    fn from(problem: OutOfRangeError) -> Self {
        Self::new(io::ErrorKind::InvalidInput, problem)
    }
}

impl MappedRegion {
    /// Private memory, freed when the process ends.
    ///
    /// # Errors
    /// When not enough memory is available. Too few huge pages are not an error, see [`PageMode::Huge`].
    pub fn anonymous(len: u64, pages: PageMode) -> Result<Self, RegionError> {
        let size = mappable(len)?;
        if pages == PageMode::Huge {
            match MemoryMapping::anonymous(size, PageMode::Huge) {
                Ok(mapping) => return Ok(Self::new(mapping, len, PageMode::Huge)),
                Err(problem) => tracing::warn!(
                    "no huge pages for {len} bytes ({problem}); set vm.nr_hugepages. Using transparent huge pages"
                ),
            }
        }
        let actual = if pages == PageMode::Huge { PageMode::Transparent } else { pages };
        let mapping = MemoryMapping::anonymous(size, actual)
            .map_err(io_error(|| format!("map {len} bytes of memory")))?;
        Ok(Self::new(mapping, len, actual))
    }

    /// Maps a file in a memory-backed volume or on a disk, created if missing. Its space is reserved at once, because a write to mapped
    /// memory on a full disk kills the process.
    ///
    /// # Errors
    /// [`RegionError::Length`] when it exists with another length; else errors of the file system.
    pub fn file(path: &Path, len: u64) -> Result<Self, RegionError> {
        mappable(len)?;
        let shown = || path.display().to_string();
        let open = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let file = open.map_err(io_error(|| format!("open {}", shown())))?;
        let found = file.metadata().map_err(io_error(|| format!("read the size of {}", shown())))?.len();
        if found != 0 && found != len {
            return Err(RegionError::Length { path: path.to_owned(), found, required: len });
        }
        reserve(&file, len).map_err(io_error(|| format!("reserve {len} bytes for {}", shown())))?;
        Self::from_fd(file.into(), len, None)
    }

    /// Creates shared memory; every process with its descriptor can map it.
    ///
    /// # Errors
    /// When not enough memory is available.
    pub fn shared(name: &str, len: u64, pages: PageMode) -> Result<(Self, OwnedFd), RegionError> {
        mappable(len)?;
        let (fd, actual) =
            memfd(name, len, pages).map_err(io_error(|| format!("create {len} bytes of memory")))?;
        let mut region =
            Self::from_fd(fd.try_clone().map_err(io_error(|| "duplicate a descriptor".into()))?, len, None)?;
        region.set_pages(actual);
        Ok((region, fd))
    }

    /// Maps the first `len` bytes of a file descriptor, at `address` if that is free (check [`MappedRegion::base`]). Without one it
    /// chooses an address that a later process will likely find free.
    ///
    /// No bytes are read: the time does not depend on the length.
    ///
    /// # Errors
    /// [`RegionError::Length`] when the memory is shorter; else errors of the operating system.
    pub fn from_fd(fd: OwnedFd, len: u64, address: Option<u64>) -> Result<Self, RegionError> {
        Self::part(fd, 0, len, address)
    }

    /// As [`MappedRegion::from_fd`], of memory that another process owns. Child processes do not have it.
    ///
    /// # Errors
    /// As [`MappedRegion::from_fd`], and [`RegionError::NotSealed`].
    pub fn from_foreign_fd(fd: OwnedFd, len: u64) -> Result<Self, RegionError> {
        if !memfd::has_sealed_length(&fd) {
            return Err(RegionError::NotSealed);
        }
        let region = Self::from_fd(fd, len, None)?;
        // A child that never unmaps it would keep the memory of a process that has ended.
        region.mapping.advise(Advice::LinuxDontFork);
        Ok(region)
    }

    /// [`MappedRegion::from_fd`] from byte `from` on, which must be page-aligned.
    ///
    /// # Errors
    /// As [`MappedRegion::from_fd`].
    pub fn part(fd: OwnedFd, from: u64, len: u64, address: Option<u64>) -> Result<Self, RegionError> {
        let size = mappable(len)?;
        let stat = rustix::fs::fstat(&fd).map_err(io_error(|| "read the size of shared memory".into()))?;
        let found = u64::try_from(stat.st_size).unwrap_or(0);
        // Bytes beyond the end of a file cannot be accessed, even if mapped.
        let required = from.saturating_add(len);
        if found < required {
            return Err(RegionError::Length { path: "shared memory".into(), found, required });
        }
        // Huge pages are mapped whole; the block size identifies them.
        let page = usize::try_from(stat.st_blksize).unwrap_or(0);
        let huge = page > (1 << 20) && found.is_multiple_of(page as u64);
        let mapped_size = if huge { crate::mapping::round_up_to_page(size, page) } else { Ok(size) };
        let mapping = mapped_size.and_then(|size| MemoryMapping::shared(fd.as_fd(), from, size, address));
        let mapping = mapping.map_err(io_error(|| format!("map {len} bytes of shared memory")))?;
        if address.is_some_and(|address| address != mapping.base()) {
            tracing::info!(
                "the address of shared memory changed from {:#x} to {:#x}",
                address.unwrap_or(0),
                mapping.base()
            );
        }
        Ok(Self::new(mapping, len, if huge { PageMode::Huge } else { PageMode::Normal }))
    }

    fn new(mapping: MemoryMapping, len: u64, pages: PageMode) -> Self {
        // Exclude caches from core dumps, which would otherwise be as large as the machine's memory.
        mapping.advise(Advice::LinuxDontDump);
        let mut region = Self { mapping, len, pages, populated: PopulatedParts::none_of(len) };
        region.set_pages(pages);
        region
    }

    /// Requests larger pages where this type of memory supports them.
    pub fn set_pages(&mut self, pages: PageMode) {
        if pages == PageMode::Transparent {
            self.mapping.advise(Advice::LinuxHugepage);
        }
        self.pages = pages;
    }

    /// Sets the NUMA placement of pages that are not written yet, and logs the result.
    pub fn set_placement(&self, placement: NumaPlacement) {
        let nodes = numa::nodes();
        if placement == NumaPlacement::Anywhere {
            return;
        }
        if let [only] = nodes[..] {
            tracing::info!("the machine has one NUMA node ({only}): no placement needed");
            return;
        }
        let span = usize::try_from(self.len).ok().and_then(|len| self.mapping.span(0, len));
        match span.map_or(Ok(()), |span| numa::place(span, placement)) {
            Ok(()) => {
                tracing::info!("placed {} bytes of memory: {placement:?} of nodes {nodes:?}", self.len);
            }
            Err(problem) => {
                tracing::warn!(
                    "cannot set the memory placement ({placement:?} of nodes {nodes:?}): {problem}"
                );
            }
        }
    }

    /// Address of the first byte in this process.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.mapping.base()
    }

    /// Length of the region in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Page mode that the region actually has.
    #[must_use]
    pub fn pages(&self) -> PageMode {
        self.pages
    }

    /// Checks that a range lies within the region.
    ///
    /// # Errors
    /// When the range exceeds the region.
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

    /// An atomic word at an offset that is a multiple of 8.
    pub(crate) fn word(&self, offset: u64) -> Result<&AtomicU64, OutOfRangeError> {
        self.span(offset, 8)?;
        self.mapping.word(offset).ok_or(OutOfRangeError { offset, len: 8, size: self.len })
    }

    /// Allocates the missing pages of a range, and maps them into this process. Pages belong to the process, and to the container, that
    /// allocates them. It is faster than one page fault per page.
    ///
    /// # Errors
    /// When the range exceeds the region, or not enough memory is available.
    pub fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check(offset, len)?;
        for part in self.populated.missing(offset, len) {
            let span = self.span(part.start, part.end - part.start)?;
            match span.populate() {
                // Linux before 5.14, where a page fault does it.
                Err(rustix::io::Errno::INVAL) | Ok(()) => self.populated.mark(part.start),
                Err(problem) => return Err(problem.into()),
            }
        }
        Ok(())
    }

    /// Copies bytes out of the region.
    ///
    /// # Errors
    /// When the range exceeds the region.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfRangeError> {
        self.span(offset, into.len() as u64)?.copy_to(into);
        Ok(())
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// When the range exceeds the region; then no byte is written.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), OutOfRangeError> {
        self.span(offset, from.len() as u64)?.copy_from(from);
        Ok(())
    }

    /// Computes the CRC-32C of a range.
    ///
    /// # Errors
    /// When the range exceeds the region.
    pub fn crc32c(&self, offset: u64, len: u64) -> Result<u32, OutOfRangeError> {
        let mut crc = Crc32c::new();
        self.update(&mut crc, offset, len)?;
        Ok(crc.value())
    }

    /// Adds a range to a checksum.
    pub(crate) fn update(&self, crc: &mut Crc32c, offset: u64, len: u64) -> Result<(), OutOfRangeError> {
        self.check(offset, len)?;
        // Copied first, because a checksum reads a slice, and these bytes may change concurrently.
        let mut copy = [0; SCRATCH_BYTES];
        for chunk in chunks(offset, len, SCRATCH_BYTES) {
            let copy = copy.get_mut(..chunk.len).unwrap_or_default();
            self.read_at(chunk.offset, copy)?;
            crc.update(copy);
        }
        Ok(())
    }
}

/// A range that is processed at once.
pub(crate) struct RegionChunk {
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

/// Splits `len` bytes at `offset` into chunks of at most `max` bytes.
pub(crate) fn chunks(offset: u64, len: u64, max: usize) -> impl Iterator<Item = RegionChunk> {
    (0..len.div_ceil(max as u64)).map(move |number| {
        let before = number * max as u64;
        let len = usize::try_from(len - before).map_or(max, |remaining| remaining.min(max));
        RegionChunk { offset: offset + before, len }
    })
}

fn mappable(len: u64) -> Result<usize, RegionError> {
    usize::try_from(len)
        .ok()
        .filter(|len| (1..=isize::MAX as usize).contains(len))
        .ok_or(RegionError::Unmappable(len))
}

/// Reserves a file's space on its disk.
pub(crate) fn reserve(file: &File, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP) => {
            tracing::warn!("this file system cannot reserve space: when it is full, writes kill the process");
            file.set_len(len)
        }
        Err(problem) => Err(problem.into()),
    }
}

fn io_error<E: Into<io::Error>>(what: impl FnOnce() -> String) -> impl FnOnce(E) -> RegionError {
    move |problem| RegionError::Io { what: what(), problem: problem.into() }
}
