//! Access to the ledger's object catalog.

use std::os::fd::AsFd;

use super::{Ledger, LedgerError};
use crate::catalog::{CatalogCounts, ObjectCatalog, ObjectRecord, ObjectVersion};

/// Result of recording an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordOutcome {
    /// The record is stored in the catalog.
    Recorded,
    /// Entries do not cover the range exactly, or some are newer than the master's report.
    Unproven,
    /// There is no catalog, no free slot, or the key is too long.
    Unrecorded,
}

impl Ledger {
    /// Opens the object catalog in memory of [`bytes_for`](crate::catalog::bytes_for) bytes. Records that do not match ledger entries are
    /// dropped and counted.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open_catalog(&self, memory: impl AsFd) -> Result<CatalogCounts, LedgerError> {
        let segment = self.identity().segment;
        let index = self.index.lock();
        let is_proven =
            |record: &ObjectRecord| index.exact_crc(record.offset, record.size, u64::MAX) == Some(record.crc);
        let catalog = ObjectCatalog::open(memory, self.size, segment, is_proven)?;
        let counts = catalog.counts();
        if counts.damaged > 0 {
            tracing::warn!(records = counts.damaged, "dropped corrupt records of a segment's object catalog");
        }
        *self.catalog.lock() = Some(catalog);
        Ok(counts)
    }

    /// Entries inserted later are newer than this. Read it before querying a master for objects.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.index.lock().version()
    }

    /// Records an object that a master has reported as complete when the ledger's version was `as_of` or higher. The checksum is taken from
    /// the ledger's entries; `record.crc` is ignored.
    ///
    /// Entries newer than `as_of` are rejected: they may belong to another object that has replaced this one.
    pub fn record_object(&self, record: ObjectRecord, as_of: u64) -> RecordOutcome {
        let index = self.index.lock();
        let Some(crc) = index.exact_crc(record.offset, record.size, as_of) else {
            return RecordOutcome::Unproven;
        };
        let mut catalog = self.catalog.lock();
        let recorded =
            catalog.as_mut().is_some_and(|catalog| catalog.record(&ObjectRecord { crc, ..record }));
        if recorded { RecordOutcome::Recorded } else { RecordOutcome::Unrecorded }
    }

    /// Removes the record of the object at an offset, unless it is newer than `version`. The bytes stay valid.
    pub fn drop_object(&self, offset: u64, version: ObjectVersion) -> bool {
        let mut catalog = self.catalog.lock();
        let Some(catalog) = catalog.as_mut() else { return false };
        catalog.version_at(offset).is_some_and(|(recorded, _)| recorded <= version)
            && catalog.remove(offset, 1) > 0
    }

    /// Highest master epoch in the catalog; 0 if there is none.
    #[must_use]
    pub fn newest_epoch(&self) -> u64 {
        self.catalog.lock().as_ref().map_or(0, ObjectCatalog::newest_epoch)
    }

    /// Version and size of the object recorded at an offset.
    #[must_use]
    pub fn object_at(&self, offset: u64) -> Option<(ObjectVersion, u64)> {
        self.catalog.lock().as_ref()?.version_at(offset)
    }

    /// Up to `limit` objects in offset order, starting at offset `from`.
    #[must_use]
    pub fn objects(&self, from: u64, limit: usize) -> Vec<ObjectRecord> {
        self.catalog.lock().as_ref().map_or_else(Vec::new, |catalog| catalog.records(from, limit))
    }

    /// Counters of the catalog; `None` if there is no catalog.
    #[must_use]
    pub fn catalog_counts(&self) -> Option<CatalogCounts> {
        self.catalog.lock().as_ref().map(ObjectCatalog::counts)
    }
}
