//! Test support for the store: masters in this process, Mooncake's own programs, and a disk in memory.

#[cfg(feature = "memory-disk")]
pub mod memory_disk;
#[cfg(feature = "mooncake")]
pub mod mooncake;
#[cfg(feature = "test-master")]
pub mod test_master;

/// Timeout that only a hanging test reaches.
pub const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);
