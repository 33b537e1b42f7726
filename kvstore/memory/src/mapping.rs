//! Memory mapped into this process. All that is unsafe about having it is here: mapping it, copying to and from it, and words in it
//! that are changed at once.
#![expect(unsafe_code, reason = "memory that other processes write to has no safe type")]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::PageMode;

/// Where mappings that shall come back at the same address are put: no system maps anything there of itself, so that a later process
/// finds the address free. 1 GiB apart, for the largest huge pages.
const OWN_ADDRESSES: std::ops::Range<usize> = 0x1000_0000_0000..0x5000_0000_0000;
const OWN_STEP: usize = 1 << 30;
/// Addresses tried before the system chooses one.
const OWN_TRIES: usize = 8;

/// Mapped memory; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct MemoryMapping {
    base: NonNull<u8>,
    /// Bytes mapped, whole pages.
    len: usize,
}

// SAFETY: the mapping belongs to no thread. Its bytes are reached only through copies, atomic words and the kernel, never through
// references to plain memory.
unsafe impl Send for MemoryMapping {}
// SAFETY: as for Send; threads that write the same bytes at the same time tear the bytes, not the program.
unsafe impl Sync for MemoryMapping {}

/// A part of a mapping, checked to lie in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MappedSpan<'a> {
    start: NonNull<u8>,
    len: usize,
    mapping: std::marker::PhantomData<&'a MemoryMapping>,
}

impl MemoryMapping {
    /// Fresh memory of this process alone.
    pub(crate) fn anonymous(len: usize, pages: PageMode) -> io::Result<Self> {
        let (flags, len) = match pages {
            PageMode::Huge => (MapFlags::HUGETLB, round_up_to_page(len, huge_page_size()?)?),
            // Miri does not know the flag.
            _ if cfg!(miri) => (MapFlags::empty(), len),
            PageMode::Normal | PageMode::Transparent => (MapFlags::NORESERVE, len),
        };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without a fixed address the kernel maps where nothing is mapped.
        let base =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE | flags)? };
        Self::new(base, len)
    }

    /// The memory behind a file descriptor from byte `from` on, at `at` when that address is free. Without `at` it is put where a later
    /// process finds the same address free.
    pub(crate) fn shared(file: BorrowedFd<'_>, from: u64, len: usize, at: Option<u64>) -> io::Result<Self> {
        let wanted = at.and_then(|at| usize::try_from(at).ok());
        let own = (0..OWN_TRIES).map(|_| {
            let step = fastrand::usize(..(OWN_ADDRESSES.end - OWN_ADDRESSES.start) / OWN_STEP);
            OWN_ADDRESSES.start + step * OWN_STEP
        });
        let tries = wanted.is_none().then_some(own).into_iter().flatten();
        for address in wanted.into_iter().chain(tries) {
            if let Some(mapping) = Self::shared_at(file, from, len, address) {
                return Ok(mapping);
            }
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without a fixed address the kernel maps where nothing is mapped.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, from)? };
        Self::new(base, len)
    }

    /// None when something else is mapped there, or nothing can be.
    fn shared_at(file: BorrowedFd<'_>, from: u64, len: usize, address: usize) -> Option<Self> {
        let wanted = ptr::without_provenance_mut(address);
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED_NOREPLACE);
        // SAFETY: FIXED_NOREPLACE never takes the place of another mapping.
        let base = unsafe { rustix::mm::mmap(wanted, len, access, flags, file, from) }.ok()?;
        let mapping = Self::new(base, len).ok()?;
        // Kernels that do not know the flag take the address for a wish.
        (base.addr() == address).then_some(mapping)
    }

    fn new(base: *mut core::ffi::c_void, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, len })
    }

    pub(crate) fn base(&self) -> u64 {
        self.base.addr().get() as u64
    }

    /// The part that begins at `offset`, if all of it lies in the mapping.
    pub(crate) fn span(&self, offset: u64, len: usize) -> Option<MappedSpan<'_>> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset` is not beyond the end of the mapping, which is one object.
        let start = unsafe { self.base.add(offset) };
        Some(MappedSpan { start, len, mapping: std::marker::PhantomData })
    }

    /// A word that is read and changed at once. None out of range, or not at a multiple of 8.
    pub(crate) fn word(&self, offset: u64) -> Option<&AtomicU64> {
        if !offset.is_multiple_of(8) {
            return None;
        }
        let span = self.span(offset, 8)?;
        // SAFETY: the eight bytes are mapped as long as `self` lives, aligned because the base is a page's, and all who use them as
        // a word (this process, or one after it) do so through atomic operations.
        Some(unsafe { AtomicU64::from_ptr(span.start.as_ptr().cast()) })
    }

    /// Tells the kernel how the memory will be used. Advice that it does not take is no error.
    pub(crate) fn advise(&self, advice: Advice) {
        if cfg!(miri) {
            // Miri has no madvise.
            return;
        }
        // SAFETY: only advice that keeps the bytes is given (see the callers), for a range that is mapped.
        if let Err(problem) = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, advice) } {
            tracing::debug!("the kernel does not take {advice:?} for mapped memory: {problem}");
        }
    }
}

impl Drop for MemoryMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`'s callers with this length; spans and words borrow the mapping, so none is left.
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

    /// Copies its first bytes out, as many as `into` takes (at most all).
    pub(crate) fn copy_to(self, into: &mut [u8]) {
        let len = into.len().min(self.len);
        // SAFETY: both are valid for `len` bytes, and a slice of this process does not lie in a mapping that is never lent as one.
        // Others may write meanwhile; then the copy is a mixture of bytes, which its checksum tells.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr(), into.as_mut_ptr(), len) }
    }

    /// Copies bytes in, as many as there is room for.
    pub(crate) fn copy_from(self, from: &[u8]) {
        let len = from.len().min(self.len);
        // SAFETY: as for `copy_to`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.start.as_ptr(), len) }
    }
}

/// `len` in whole pages of `page` bytes.
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
    fn copies_reach_as_far_as_the_shorter_side() {
        let mapping = MemoryMapping::anonymous(4096, PageMode::Normal).unwrap();
        mapping.span(10, 4).unwrap().copy_from(b"abcdefgh");
        let mut out = [b'-'; 8];
        mapping.span(9, 6).unwrap().copy_to(&mut out);
        assert_eq!(&out, b"\0abcd\0--");
    }

    #[test]
    fn a_word_is_the_bytes_that_lie_there() {
        let mapping = MemoryMapping::anonymous(4096, PageMode::Normal).unwrap();
        mapping.word(64).unwrap().store(u64::from_ne_bytes(*b"12345678"), Ordering::Release);
        let mut out = [0; 8];
        mapping.span(64, 8).unwrap().copy_to(&mut out);
        assert_eq!(&out, b"12345678");
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn shared_memory_is_mapped_again_where_it_was() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 16).unwrap();
        let first = MemoryMapping::shared(file.as_fd(), 0, 1 << 16, None).unwrap();
        first.span(100, 5).unwrap().copy_from(b"moons");
        let base = first.base();
        assert!(OWN_ADDRESSES.contains(&usize::try_from(base).unwrap()), "{base:#x}");

        let beside = MemoryMapping::shared(file.as_fd(), 0, 1 << 16, Some(base)).unwrap();
        assert_ne!(beside.base(), base, "the address is taken");
        drop(first);
        let again = MemoryMapping::shared(file.as_fd(), 0, 1 << 16, Some(base)).unwrap();
        assert_eq!(again.base(), base);
        for mapping in [beside, again] {
            let mut out = [0; 5];
            mapping.span(100, 5).unwrap().copy_to(&mut out);
            assert_eq!(&out, b"moons");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn impossible_wishes_for_an_address_are_passed_over() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        for at in [1, 4097, u64::MAX, !0xfff] {
            let mapping = MemoryMapping::shared(file.as_fd(), 0, 4096, Some(at)).unwrap();
            assert_ne!(mapping.base(), at);
        }
    }
}
