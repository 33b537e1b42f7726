//! The files of a log before it is opened.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::damage::LogDamage;
use crate::directory::LogDirectory;
use crate::file::{HEADER_SIZE, LogFileHeader, PREFIX, SUFFIX};
use crate::options::OplogOptions;
use crate::scan::{LastWriterState, LogScan};
use crate::synced_mark::{self, SyncedMark};
use crate::{OplogError, io_error, shutdown_mark};

/// The files of a log before it is opened.
pub struct LogFiles {
    pub(crate) all: Vec<(u64, PathBuf)>,
    /// Files without a header, left by a crash during their creation.
    pub(crate) unfinished: Vec<PathBuf>,
    /// Header of the newest file.
    pub(crate) header: Option<LogFileHeader>,
    pub(crate) scan: LogScan,
    pub(crate) closed_at: Option<u64>,
}

impl LogFiles {
    /// Reads the files without modifying them.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn read(folder: &LogDirectory, options: &OplogOptions) -> Result<Self, OplogError> {
        let (mut all, mut unfinished) =
            (folder.numbered(PREFIX, SUFFIX).map_err(io_error(folder.path()))?, Vec::new());
        while let Some((_, path)) = all.last()
            && is_unfinished(folder, path)?
        {
            unfinished.extend(all.pop().map(|(_, path)| path));
        }
        let closed_at = shutdown_mark::read(folder)?;
        let marked = SyncedMark::read(folder)?;
        let flushed_through = marked.number().max(closed_at.unwrap_or(0));
        let (mut scan, mut header) = (LogScan::default(), None);
        let mut bytes = Vec::new();
        for (nth, (first, path)) in all.iter().enumerate() {
            bytes.clear();
            let read = folder.disk().open_to_read(path).and_then(|mut file| file.read_to_end(&mut bytes));
            read.map_err(io_error(path))?;
            header = scan.file(path, *first, &bytes);
            if nth + 1 < all.len() {
                scan.rest_of_older(path, &bytes);
                continue;
            }
            let same_boot = header.as_ref().is_some_and(|header| header.is_from_boot(&options.boot_id));
            scan.rest_of_newest(path, *first, &bytes, LastWriterState { same_boot, flushed_through });
        }
        if all.is_empty() {
            scan.ends_too_early(folder.path(), 0, 0, flushed_through);
        }
        if marked == SyncedMark::Damaged {
            scan.add_record(&folder.path().join(synced_mark::NAME), 0, 0, "the file is corrupt");
        }
        Ok(Self { all, unfinished, header, scan, closed_at })
    }

    /// Number of the last readable record.
    pub(crate) fn last(&self) -> u64 {
        self.all.last().map_or(0, |(first, _)| self.scan.last(*first).max(first.saturating_sub(1)))
    }

    /// Written records that cannot be read.
    pub fn damage(&self) -> Option<&LogDamage> {
        self.scan.damage()
    }

    /// Whether committed records may be lost because the machine crashed before they were flushed. Opening the log resets this.
    pub fn may_lack_records(&self, options: &OplogOptions) -> bool {
        if self.all.is_empty() || self.closed_at == Some(self.last()) {
            return false;
        }
        let Some(header) = &self.header else { return true };
        !header.is_from_boot(&options.boot_id) && !header.flushed
    }
}

impl std::fmt::Debug for LogFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogFiles").field("files", &self.all).field("scan", &self.scan).finish_non_exhaustive()
    }
}

/// Whether a crash interrupted the creation of a file before its header was written.
fn is_unfinished(folder: &LogDirectory, path: &Path) -> Result<bool, OplogError> {
    if folder.disk().length(path).map_err(io_error(path))? > HEADER_SIZE as u64 {
        return Ok(false);
    }
    Ok(LogFileHeader::read(&folder.disk().read(path).map_err(io_error(path))?).is_none())
}
