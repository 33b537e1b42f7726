//! Memory mapped into this process. All unsafe code of mappings is here: mapping, copying to and from the memory, and atomic words in it.
#![expect(unsafe_code, reason = "memory that other processes write to has no safe type")]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::PageMode;

/// Address range for mappings that should get the same address after a restart: systems do not place their own mappings there, so the
/// address is likely to be free. 1 GiB apart, for the largest huge pages.
const FIXED_ADDRESS_RANGE: std::ops::Range<usize> = 0x1000_0000_0000..0x5000_0000_0000;
const FIXED_ADDRESS_STEP: usize = 1 << 30;
/// Number of addresses tried before the system chooses one.
const FIXED_ADDRESS_TRIES: usize = 8;

/// A memory mapping, unmapped on drop.
#[derive(Debug)]
pub(crate) struct MemoryMapping {
    base: NonNull<u8>,
    /// Length of the mapping in bytes, whole pages.
    len: usize,
}

// SAFETY: the mapping is not bound to a thread. Its bytes are accessed only through copies, atomic words and the kernel, never through
// references to plain memory.
unsafe impl Send for MemoryMapping {}
// SAFETY: as for Send; concurrent writes to the same bytes mix their data, without other effects.
unsafe impl Sync for MemoryMapping {}

/// A bounds-checked range of a mapping.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MappedSpan<'a> {
    start: NonNull<u8>,
    len: usize,
    mapping: std::marker::PhantomData<&'a MemoryMapping>,
}

impl MemoryMapping {
    /// Maps new private memory.
    pub(crate) fn anonymous(len: usize, pages: PageMode) -> io::Result<Self> {
        let (flags, len) = match pages {
            PageMode::Huge => (MapFlags::HUGETLB, round_up_to_page(len, huge_page_size()?)?),
            // Miri does not support the flag.
            _ if cfg!(miri) => (MapFlags::empty(), len),
            PageMode::Normal | PageMode::Transparent => (MapFlags::NORESERVE, len),
        };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without a fixed address the kernel maps where nothing is mapped.
        let base =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE | flags)? };
        Self::new(base, len)
    }

    /// Maps shared memory of a file descriptor from byte `from` on, at `address` if that is free. Without an address it chooses one that a
    /// later process will likely find free.
    pub(crate) fn shared(
        file: BorrowedFd<'_>,
        from: u64,
        len: usize,
        address: Option<u64>,
    ) -> io::Result<Self> {
        let requested = address.and_then(|address| usize::try_from(address).ok());
        let candidates = (0..FIXED_ADDRESS_TRIES).map(|_| {
            let step =
                fastrand::usize(..(FIXED_ADDRESS_RANGE.end - FIXED_ADDRESS_RANGE.start) / FIXED_ADDRESS_STEP);
            FIXED_ADDRESS_RANGE.start + step * FIXED_ADDRESS_STEP
        });
        let tries = requested.is_none().then_some(candidates).into_iter().flatten();
        for address in requested.into_iter().chain(tries) {
            if let Some(mapping) = Self::shared_at(file, from, len, address) {
                return Ok(mapping);
            }
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without a fixed address the kernel maps where nothing is mapped.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, from)? };
        Self::new(base, len)
    }

    /// `None` if the address is in use, or the mapping fails.
    fn shared_at(file: BorrowedFd<'_>, from: u64, len: usize, address: usize) -> Option<Self> {
        let hint = ptr::without_provenance_mut(address);
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED_NOREPLACE);
        // SAFETY: FIXED_NOREPLACE never replaces another mapping.
        let base = unsafe { rustix::mm::mmap(hint, len, access, flags, file, from) }.ok()?;
        let mapping = Self::new(base, len).ok()?;
        // Old kernels ignore the flag and treat the address as a hint.
        (base.addr() == address).then_some(mapping)
    }

    fn new(base: *mut core::ffi::c_void, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, len })
    }

    pub(crate) fn base(&self) -> u64 {
        self.base.addr().get() as u64
    }

    /// The range at `offset`, if it lies within the mapping.
    pub(crate) fn span(&self, offset: u64, len: usize) -> Option<MappedSpan<'_>> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset` is within the mapping, which is one allocated object.
        let start = unsafe { self.base.add(offset) };
        Some(MappedSpan { start, len, mapping: std::marker::PhantomData })
    }

    /// An atomic word. `None` if out of range or not aligned to 8 bytes.
    pub(crate) fn word(&self, offset: u64) -> Option<&AtomicU64> {
        if !offset.is_multiple_of(8) {
            return None;
        }
        let span = self.span(offset, 8)?;
        // SAFETY: the eight bytes stay mapped as long as `self` lives and are aligned, because the base is page-aligned; all users of the
        // word (in this or a later process) access it atomically.
        Some(unsafe { AtomicU64::from_ptr(span.start.as_ptr().cast()) })
    }

    /// Gives the kernel advice about the memory. Rejected advice is not an error.
    pub(crate) fn advise(&self, advice: Advice) {
        if cfg!(miri) {
            // Miri has no madvise.
            return;
        }
        // SAFETY: callers pass only advice that preserves the bytes, and the range is mapped.
        if let Err(problem) = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, advice) } {
            tracing::debug!("the kernel rejected {advice:?} for mapped memory: {problem}");
        }
    }
}

impl Drop for MemoryMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by the callers of `new` with this length; spans and words borrow the mapping, so none is left.
        if let Err(problem) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::error!("cannot unmap {} bytes of memory: {problem}", self.len);
        }
    }
}

impl MappedSpan<'_> {
    pub(crate) fn start(self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Allocates and maps its pages.
    pub(crate) fn populate(self) -> rustix::io::Result<()> {
        if cfg!(miri) {
            // Miri has no madvise.
            return Ok(());
        }
        // SAFETY: the range is mapped, and the advice preserves the bytes.
        unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxPopulateWrite) }
    }

    /// Copies the first bytes of the range out, up to the length of `into`.
    pub(crate) fn copy_to(self, into: &mut [u8]) {
        let len = into.len().min(self.len);
        // SAFETY: both are valid for `len` bytes, and a slice of this process never lies in a mapping. Concurrent writes may mix the copied
        // data, which its checksum detects.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr(), into.as_mut_ptr(), len) }
    }

    /// Copies bytes into the range, up to its length.
    pub(crate) fn copy_from(self, from: &[u8]) {
        let len = from.len().min(self.len);
        // SAFETY: as for `copy_to`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.start.as_ptr(), len) }
    }
}

/// Rounds `len` up to whole pages of `page` bytes.
pub(crate) fn round_up_to_page(len: usize, page: usize) -> io::Result<usize> {
    len.checked_next_multiple_of(page).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
}

/// Bytes of a huge page of the machine's default size.
pub(crate) fn huge_page_size() -> io::Result<usize> {
    let table = std::fs::read_to_string("/proc/meminfo")?;
    let line = table.lines().find_map(|line| line.strip_prefix("Hugepagesize:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok());
    kib.and_then(|kib| kib.checked_mul(1024)).ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn spans_and_words_never_reach_beyond_the_end() {
        let mapping = MemoryMapping::anonymous(8192, PageMode::Normal).unwrap();
        assert!(mapping.span(0, 8192).is_some());
        assert!(mapping.span(8192, 0).is_some());
        assert!(mapping.span(1, 8192).is_none());
        assert!(mapping.span(8193, 0).is_none());
        assert!(mapping.span(u64::MAX, 2).is_none());
        assert!(mapping.span(2, usize::MAX).is_none());
        assert!(mapping.word(8184).is_some());
        assert!(mapping.word(8185).is_none());
        assert!(mapping.word(4).is_none(), "not aligned");
        assert!(mapping.word(8192).is_none());
    }

    #[test]
    fn copies_are_limited_to_the_shorter_side() {
        let mapping = MemoryMapping::anonymous(4096, PageMode::Normal).unwrap();
        mapping.span(10, 4).unwrap().copy_from(b"abcdefgh");
        let mut out = [b'-'; 8];
        mapping.span(9, 6).unwrap().copy_to(&mut out);
        assert_eq!(&out, b"\0abcd\0--");
    }

    #[test]
    fn a_word_and_its_bytes_are_the_same_memory() {
        let mapping = MemoryMapping::anonymous(4096, PageMode::Normal).unwrap();
        mapping.word(64).unwrap().store(u64::from_ne_bytes(*b"12345678"), Ordering::Release);
        let mut out = [0; 8];
        mapping.span(64, 8).unwrap().copy_to(&mut out);
        assert_eq!(&out, b"12345678");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn shared_memory_is_remapped_at_its_address() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 16).unwrap();
        let first = MemoryMapping::shared(file.as_fd(), 0, 1 << 16, None).unwrap();
        first.span(100, 5).unwrap().copy_from(b"moons");
        let base = first.base();
        assert!(FIXED_ADDRESS_RANGE.contains(&usize::try_from(base).unwrap()), "{base:#x}");

        let second = MemoryMapping::shared(file.as_fd(), 0, 1 << 16, Some(base)).unwrap();
        assert_ne!(second.base(), base, "the address is taken");
        drop(first);
        let remapped = MemoryMapping::shared(file.as_fd(), 0, 1 << 16, Some(base)).unwrap();
        assert_eq!(remapped.base(), base);
        for mapping in [second, remapped] {
            let mut out = [0; 5];
            mapping.span(100, 5).unwrap().copy_to(&mut out);
            assert_eq!(&out, b"moons");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn impossible_addresses_are_ignored() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        for address in [1, 4097, u64::MAX, !0xfff] {
            let mapping = MemoryMapping::shared(file.as_fd(), 0, 4096, Some(address)).unwrap();
            assert_ne!(mapping.base(), address);
        }
    }
}
