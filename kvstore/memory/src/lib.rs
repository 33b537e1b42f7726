//! Memory of a store node that outlives its process.
//!
//! - [`MappedRegion`]: mapped memory, anonymous or shared. Peers write into it while others read, so its bytes are never lent as a slice:
//!   they are copied out and in, and go between a socket and the mapping in the kernel.
//! - [`ledger`]: which parts of a region were written to their end. A process that comes after one that was killed goes on with them.
//! - [`catalog`]: which objects lie there, for a master that has lost its log.
//! - [`holder`]: who keeps memory while its process is away.
//! - [`SegmentMemory`]: a region with its ledger, opened with what it holds, or begun anew.
//! - [`Scrubber`]: reads them again in the background, and finds bits that have changed.
//! - [`numa`]: on which memory node a region's pages lie.

pub mod catalog;
mod checksum;
pub mod holder;
pub mod ledger;
mod mapping;
mod memfd;
pub mod numa;
mod region;
mod scrub;
pub mod segment;
mod socket;
mod stream;

pub use catalog::{ObjectRecord, ObjectVersion};
pub use checksum::Crc32c;
pub use ledger::Ledger;
pub use memfd::{memfd, reopen};
pub use region::{MappedRegion, OutOfRangeError, RegionError};
pub use scrub::{ScrubStepResult, Scrubber};
pub use segment::{SegmentBacking, SegmentMemory, SegmentOptions};

/// How large the pages are that a region consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PageMode {
    /// The system's own, 4 KiB mostly.
    #[default]
    Normal,
    /// The system makes them large where it can.
    Transparent,
    /// Huge pages that the machine's operator has set aside (`vm.nr_hugepages`), of the default size. Where there are too few of
    /// them a region falls back to [`PageMode::Transparent`], and says so in the log.
    Huge,
}
