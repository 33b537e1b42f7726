//! Memory of a store node that outlives its process.
//!
//! - [`Region`]: mapped memory, anonymous or shared. Peers write into it while others read, so its bytes are never lent as a slice:
//!   they are copied out and in, and go between a socket and the mapping in the kernel.
//! - [`numa`]: on which memory node a region's pages lie.

mod checksum;
mod mapping;
mod memfd;
pub mod numa;
mod region;
mod socket;

pub use checksum::Crc32c;
pub use memfd::{memfd, reopen};
pub use region::{Error, OutOfRange, Region};

/// How large the pages are that a region consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pages {
    /// The system's own, 4 KiB mostly.
    #[default]
    Normal,
    /// The system makes them large where it can.
    Transparent,
    /// Huge pages that the machine's operator has set aside (`vm.nr_hugepages`), of the default size. Where there are too few of
    /// them a region falls back to [`Pages::Transparent`], and says so in the log.
    Huge,
}
