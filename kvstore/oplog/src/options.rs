//! Options of a log.

use std::fs;

#[derive(Debug, Clone)]
pub struct OplogOptions {
    /// Size in bytes at which a new file is started.
    pub file_bytes: u64,
    /// Whether a commit flushes to the disk. Otherwise it only writes to the page cache, which survives a crash of the process but not of
    /// the machine.
    pub flush_always: bool,
    /// Boot id of the machine; see [`boot_id`].
    pub boot_id: String,
}

impl Default for OplogOptions {
    fn default() -> Self {
        Self { file_bytes: 64 << 20, flush_always: false, boot_id: boot_id() }
    }
}

/// The kernel's boot id, which changes at every start of the machine; empty if it cannot be read.
fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}
