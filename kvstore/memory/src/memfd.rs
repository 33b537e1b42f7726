//! Memory behind a file descriptor: it lives as long as any process has the descriptor or maps it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::PageMode;
use crate::mapping::{huge_page_size, round_up_to_page};

/// New memory of `len` bytes that can be handed to another process, and of which pages it consists. `name` appears in `/proc`.
///
/// Its length is sealed: no process can cut it short under another that has it mapped.
///
/// # Errors
/// As the system says; [`PageMode::Huge`] falls back instead.
pub fn memfd(name: &str, len: u64, pages: PageMode) -> io::Result<(OwnedFd, PageMode)> {
    if pages == PageMode::Huge {
        match huge(name, len) {
            Ok(file) => return Ok((file, PageMode::Huge)),
            Err(problem) => tracing::warn!(
                "{name}: no huge pages for {len} bytes ({problem}); set vm.nr_hugepages. Taking transparent ones"
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
    // Huge pages are set aside now, so that there is no surprise when they are first written.
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len)?;
    Ok(file)
}

fn seal(file: &OwnedFd, len: u64) -> io::Result<()> {
    rustix::fs::ftruncate(file, len)?;
    rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(())
}

/// The same file, opened anew: locks are held by an opening, and a descriptor that came from another process shares its own.
///
/// # Errors
/// As the system says; `/proc` must be there.
pub fn reopen(file: impl AsFd) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    File::options().read(true).write(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memory files")]
    fn nobody_can_cut_it_short() {
        let (memory, pages) = memfd("moongate-test", 10_000, PageMode::Normal).unwrap();
        assert_eq!(pages, PageMode::Normal);
        let file = File::from(memory);
        assert_eq!(file.metadata().unwrap().len(), 10_000);
        assert!(file.set_len(5_000).is_err());
        assert!(file.set_len(20_000).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memory files")]
    fn each_opening_has_a_lock_of_its_own() {
        let (memory, _) = memfd("moongate-test", 4096, PageMode::Normal).unwrap();
        let (one, two) = (reopen(&memory).unwrap(), reopen(&memory).unwrap());
        one.try_lock().unwrap();
        assert!(two.try_lock().is_err());
        drop(one);
        two.try_lock().unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memory files")]
    fn huge_pages_or_those_that_there_are() {
        let (memory, pages) = memfd("moongate-test", 1, PageMode::Huge).unwrap();
        let len = File::from(memory).metadata().unwrap().len();
        match pages {
            PageMode::Huge => assert_eq!(len, huge_page_size().unwrap() as u64),
            other => assert_eq!((other, len), (PageMode::Transparent, 1)),
        }
    }
}
