//! Store node memory that survives a restart of the process.
//!
//! - [`MappedRegion`]: mapped memory, anonymous or shared. Peers write to it while others read, so it never hands out slices: bytes are
//!   copied in and out, or moved by the kernel between a socket and the mapping.
//! - [`ledger`]: the completely written ranges of a region. After a crash the next process keeps serving them.
//! - [`catalog`]: the objects in a segment, for a master that has lost its log.
//! - [`holder`]: a process that keeps memory while the store restarts.
//! - [`SegmentMemory`]: a region with its ledger, restored or new.
//! - [`packet_socket`]: gives other processes of the host memory to map.
//! - [`Scrubber`]: re-reads written ranges in the background and detects corruption.
//! - [`numa`]: NUMA placement of a region's pages.

pub mod catalog;
mod checksum;
pub mod holder;
pub mod ledger;
mod mapping;
mod memfd;
pub mod numa;
pub mod packet_socket;
mod populated;
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

/// Page size of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PageMode {
    /// Normal pages, usually 4 KiB.
    #[default]
    Normal,
    /// Transparent huge pages where the system can provide them.
    Transparent,
    /// Reserved huge pages (`vm.nr_hugepages`) of the default size. If too few are free, a region falls back to [`PageMode::Transparent`]
    /// and logs a warning.
    Huge,
}
