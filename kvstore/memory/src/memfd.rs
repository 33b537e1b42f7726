//! Memory behind a file descriptor: it lives as long as any process has the descriptor open or maps it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::PageMode;
use crate::mapping::{huge_page_size, round_up_to_page};

/// Creates memory of `len` bytes that can be shared with another process; returns the page mode too. `name` appears in `/proc`.
///
/// The length is sealed: no process can truncate it while another has it mapped.
///
/// # Errors
/// Errors of the operating system; [`PageMode::Huge`] falls back instead.
pub fn memfd(name: &str, len: u64, pages: PageMode) -> io::Result<(OwnedFd, PageMode)> {
    if pages == PageMode::Huge {
        match huge(name, len) {
            Ok(file) => return Ok((file, PageMode::Huge)),
            Err(problem) => tracing::warn!(
                "{name}: no huge pages for {len} bytes ({problem}); set vm.nr_hugepages. Using transparent huge pages"
            ),
        }
    }
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    seal(&file, len)?;
    Ok((file, if pages == PageMode::Huge { PageMode::Transparent } else { pages }))
}

fn huge(name: &str, len: u64) -> io::Result<OwnedFd> {
    let too_long = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let len = round_up_to_page(usize::try_from(len).map_err(too_long)?, huge_page_size()?)? as u64;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let file = rustix::fs::memfd_create(name, flags)?;
    seal(&file, len)?;
    // Allocate the huge pages now, so that the first write cannot fail.
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len)?;
    Ok(file)
}

fn seal(file: &OwnedFd, len: u64) -> io::Result<()> {
    rustix::fs::ftruncate(file, len)?;
    rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(())
}

/// Whether no process can make the memory shorter.
pub(crate) fn has_sealed_length(file: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// Opens the same file again: locks belong to an open file description, which a descriptor from another process shares.
///
/// # Errors
/// Errors of the operating system; needs `/proc`.
pub fn reopen(file: impl AsFd) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    File::options().read(true).write(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memory files")]
    fn the_length_is_sealed() {
        let (memory, pages) = memfd("moongate-test", 10_000, PageMode::Normal).unwrap();
        assert_eq!(pages, PageMode::Normal);
        let file = File::from(memory);
        assert_eq!(file.metadata().unwrap().len(), 10_000);
        assert!(file.set_len(5_000).is_err());
        assert!(file.set_len(20_000).is_err());
        assert!(has_sealed_length(&file));
        let unsealed = rustix::fs::memfd_create("moongate-test", MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(!has_sealed_length(unsealed));
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memory files")]
    fn each_reopened_file_has_its_own_lock() {
        let (memory, _) = memfd("moongate-test", 4096, PageMode::Normal).unwrap();
        let (first, second) = (reopen(&memory).unwrap(), reopen(&memory).unwrap());
        first.try_lock().unwrap();
        assert!(second.try_lock().is_err());
        drop(first);
        second.try_lock().unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memory files")]
    fn huge_pages_fall_back_to_transparent_ones() {
        let (memory, pages) = memfd("moongate-test", 1, PageMode::Huge).unwrap();
        let len = File::from(memory).metadata().unwrap().len();
        match pages {
            PageMode::Huge => assert_eq!(len, huge_page_size().unwrap() as u64),
            other => assert_eq!((other, len), (PageMode::Transparent, 1)),
        }
    }
}
