//! Damage to a log's files, and preserving damaged files.

use std::io;
use std::path::{Path, PathBuf};

use crate::directory::LogDirectory;
use crate::{OplogError, io_error};

/// Name prefix of a directory with preserved damaged files.
const PREFIX: &str = "damaged-";
/// Maximum number of directories with preserved files; older ones are removed.
const MAX_PRESERVED: usize = 3;
/// Maximum total bytes of preserved files. The newest directory is retained regardless of its size.
const MAX_PRESERVED_BYTES: u64 = 1 << 30;

/// Written records of a log that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogDamage {
    /// The first file with damage.
    pub path: PathBuf,
    /// Offset of the damage in that file, in bytes.
    pub offset: u64,
    pub reason: &'static str,
    /// Bytes that do not belong to readable records.
    pub unreadable_bytes: u64,
    /// Minimum number of missing records. More may be missing at the end.
    pub missing_records: u64,
    /// Number of the last record before the damage; 0 if there is none.
    pub readable_to: u64,
}

impl std::fmt::Display for LogDamage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, offset, reason, unreadable_bytes, missing_records, .. } = self;
        write!(
            f,
            "{} at byte {offset}: {reason} ({unreadable_bytes} bytes unreadable, at least {missing_records} records missing)",
            path.display()
        )
    }
}

impl LogDirectory {
    /// Preserves the log and snapshot files in a separate directory for later analysis, and returns its path. Removes older such
    /// directories above the limits.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn preserve(&self) -> Result<PathBuf, OplogError> {
        let target =
            self.path().join(format!("{PREFIX}{:06}", self.next_preserved().map_err(io_error(self.path()))?));
        self.preserve_in(&target).map_err(io_error(&target))?;
        self.prune_preserved().map_err(io_error(self.path()))?;
        Ok(target)
    }

    fn preserve_in(&self, target: &Path) -> io::Result<()> {
        self.disk().create_folder(target)?;
        for name in self.disk().list(self.path())? {
            let is_state = name.ends_with(".log") || name.ends_with(".snap");
            if is_state || name == crate::synced_mark::NAME || name == crate::shutdown_mark::NAME {
                self.disk().link(&self.path().join(&name), &target.join(&name))?;
            }
        }
        self.disk().flush_folder(target)?;
        self.flush()
    }

    /// Directories with preserved files, oldest first.
    fn preserved(&self) -> io::Result<Vec<(u64, PathBuf)>> {
        let names = self.disk().list(self.path())?;
        let number = |name: &str| name.strip_prefix(PREFIX)?.parse().ok();
        let mut directories: Vec<(u64, PathBuf)> =
            names.iter().filter_map(|name| Some((number(name)?, self.path().join(name)))).collect();
        directories.sort();
        Ok(directories)
    }

    fn next_preserved(&self) -> io::Result<u64> {
        Ok(self.preserved()?.last().map_or(1, |(number, _)| number.saturating_add(1)))
    }

    /// Removes the oldest directories with preserved files above the limits.
    ///
    /// # Errors
    /// Errors of the file system.
    fn prune_preserved(&self) -> io::Result<()> {
        let mut bytes = 0_u64;
        for (nth, (_, path)) in self.preserved()?.iter().rev().enumerate() {
            for name in self.disk().list(path)? {
                bytes = bytes.saturating_add(self.disk().length(&path.join(name))?);
            }
            if nth > 0 && (nth >= MAX_PRESERVED || bytes > MAX_PRESERVED_BYTES) {
                self.disk().remove_folder(path)?;
            }
        }
        Ok(())
    }
}
