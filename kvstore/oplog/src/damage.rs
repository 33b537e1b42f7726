//! Damage to a log's files, and what is kept of them.

use std::io;
use std::path::{Path, PathBuf};

use crate::directory::LogDirectory;
use crate::{OplogError, io_error};

/// The beginning of the name of a folder with files that were damaged.
const PREFIX: &str = "damaged-";
/// Folders with damaged files that are kept: the newest.
const MAX_PRESERVED: usize = 3;
/// Bytes of damaged files that are kept, in all folders together. The newest folder is kept whatever its size.
const MAX_PRESERVED_BYTES: u64 = 1 << 30;

/// Records of a log that had been written and cannot be read any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogDamage {
    /// The first file with damage.
    pub path: PathBuf,
    /// Where it begins there.
    pub offset: u64,
    /// What is wrong there.
    pub reason: &'static str,
    /// Bytes that are no readable records.
    pub unreadable_bytes: u64,
    /// Missing records, at least. There may be more at the end.
    pub missing_records: u64,
    /// The last record before the damage; 0 if there is none.
    pub readable_to: u64,
}

impl std::fmt::Display for LogDamage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, offset: at, reason: what, unreadable_bytes, missing_records, .. } = self;
        write!(
            f,
            "{} at byte {at}: {what} ({unreadable_bytes} bytes unreadable, at least {missing_records} records missing)",
            path.display()
        )
    }
}

impl LogDirectory {
    /// Keeps the log and snapshot files as they are in a folder of their own, for later analysis. Older such
    /// folders are removed. Returns the folder.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn preserve(&self) -> Result<PathBuf, OplogError> {
        let kept =
            self.path().join(format!("{PREFIX}{:06}", self.next_preserved().map_err(io_error(self.path()))?));
        self.preserve_in(&kept).map_err(io_error(&kept))?;
        self.prune_preserved().map_err(io_error(self.path()))?;
        Ok(kept)
    }

    fn preserve_in(&self, kept: &Path) -> io::Result<()> {
        self.disk().create_folder(kept)?;
        for name in self.disk().list(self.path())? {
            let is_state = name.ends_with(".log") || name.ends_with(".snap");
            if is_state || name == crate::synced_mark::NAME || name == crate::log::CLEAN_SHUTDOWN_FILE {
                self.disk().link(&self.path().join(&name), &kept.join(&name))?;
            }
        }
        self.disk().flush_folder(kept)?;
        self.flush()
    }

    /// Folders with damaged files, the oldest first.
    fn preserved(&self) -> io::Result<Vec<(u64, PathBuf)>> {
        let names = self.disk().list(self.path())?;
        let number = |name: &str| name.strip_prefix(PREFIX)?.parse().ok();
        let mut kept: Vec<(u64, PathBuf)> =
            names.iter().filter_map(|name| Some((number(name)?, self.path().join(name)))).collect();
        kept.sort();
        Ok(kept)
    }

    fn next_preserved(&self) -> io::Result<u64> {
        Ok(self.preserved()?.last().map_or(1, |(number, _)| number.saturating_add(1)))
    }

    /// Removes the oldest folders with damaged files that are too many or too large.
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
