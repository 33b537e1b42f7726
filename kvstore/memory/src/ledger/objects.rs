//! The ledger's catalog of objects.

use std::os::fd::AsFd;

use super::{Ledger, LedgerError};
use crate::catalog::{CatalogCounts, ObjectCatalog, ObjectRecord, ObjectVersion};

/// What became of the record of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordOutcome {
    /// The catalog has it.
    Recorded,
    /// The range is not covered by entries to the byte, or some of them are newer than the master's report.
    Unproven,
    /// There is no catalog, no slot, or the key is too long.
    Unrecorded,
}

impl Ledger {
    /// Opens the catalog of objects in memory of [`bytes_for`](crate::catalog::bytes_for) bytes. Records that the ledger's entries do
    /// not prove are dropped and counted.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open_catalog(&self, memory: impl AsFd) -> Result<CatalogCounts, LedgerError> {
        let segment = self.identity().segment;
        let index = self.index.lock();
        let is_proven = |it: &ObjectRecord| index.exact_crc(it.offset, it.size, u64::MAX) == Some(it.crc);
        let catalog = ObjectCatalog::open(memory, self.size, segment, is_proven)?;
        let counts = catalog.counts();
        if counts.damaged > 0 {
            tracing::warn!(
                records = counts.damaged,
                "records of a segment's catalog of objects are damaged and dropped"
            );
        }
        *self.catalog.lock() = Some(catalog);
        Ok(counts)
    }

    /// Entries that are entered from now on are newer than this. To be read before a master is queried for objects.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.index.lock().version()
    }

    /// Records an object that a master has reported as complete when the ledger's version was `as_of` or higher. Its checksum is that of
    /// the ledger's entries; `record.crc` is not read.
    ///
    /// The entries must not be newer than `as_of`: a newer one may be that of the object that the range belongs to by now.
    pub fn record_object(&self, record: ObjectRecord, as_of: u64) -> RecordOutcome {
        let index = self.index.lock();
        let Some(crc) = index.exact_crc(record.offset, record.size, as_of) else {
            return RecordOutcome::Unproven;
        };
        let mut catalog = self.catalog.lock();
        let recorded = catalog.as_mut().is_some_and(|it| it.record(&ObjectRecord { crc, ..record }));
        if recorded { RecordOutcome::Recorded } else { RecordOutcome::Unrecorded }
    }

    /// Drops the record of the object that begins at an offset, as far as it is not newer than `version`. The bytes stay whole.
    pub fn drop_object(&self, offset: u64, version: ObjectVersion) -> bool {
        let mut catalog = self.catalog.lock();
        let Some(catalog) = catalog.as_mut() else { return false };
        catalog.version_at(offset).is_some_and(|(known, _)| known <= version) && catalog.remove(offset, 1) > 0
    }

    /// The highest epoch of a master that the catalog has records of; 0 if it has none.
    #[must_use]
    pub fn newest_epoch(&self) -> u64 {
        self.catalog.lock().as_ref().map_or(0, ObjectCatalog::newest_epoch)
    }

    /// The version and size of the object that is recorded at an offset.
    #[must_use]
    pub fn object_at(&self, offset: u64) -> Option<(ObjectVersion, u64)> {
        self.catalog.lock().as_ref()?.version_at(offset)
    }

    /// Objects in the order of their offsets, at most `most` of them, from the first that begins at `from` or later.
    #[must_use]
    pub fn objects(&self, from: u64, most: usize) -> Vec<ObjectRecord> {
        self.catalog.lock().as_ref().map_or_else(Vec::new, |it| it.records(from, most))
    }

    /// Numbers about the catalog. None if there is none.
    #[must_use]
    pub fn catalog_counts(&self) -> Option<CatalogCounts> {
        self.catalog.lock().as_ref().map(ObjectCatalog::counts)
    }
}
