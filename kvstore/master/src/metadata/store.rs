//! Metadata entries, in memory and optionally persistent.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use moongate_oplog::{LogDirectory, OperationLog, OplogOptions, snapshot};
use parking_lot::Mutex;

use super::record::MetadataRecord;
use crate::journal::Journal;
use crate::record;

/// Maximum key length in bytes.
const MAX_KEY: usize = 4096;
const MAX_ENTRIES: usize = 1 << 18;
/// Maximum size of all entries in bytes.
const MAX_BYTES: usize = 256 << 20;
/// Size of the log in bytes after which it is compacted, unless the entries themselves are larger.
const COMPACTION_BYTES: u64 = 4 << 20;
/// Part of keys that must not be overwritten: they hold the RPC address of a client. A writer with the same key is the same client, or
/// another one with the same name.
const UNIQUE_KEY_MARKER: &str = "rpc_meta";

/// The metadata store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum MetadataStoreError {
    /// The folder or its log cannot be used.
    #[error("metadata folder: {0}")]
    Log(#[from] moongate_oplog::OplogError),
    /// Records between the newest snapshot and the log are missing.
    #[error(
        "gap in the metadata folder: the snapshot ends with record {snapshot}, the log starts with {log}; move the folder away to start empty"
    )]
    Gap {
        /// Last record that the snapshot contains.
        snapshot: u64,
        /// First record of the log.
        log: u64,
    },
}

/// Result of writing an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataPutOutcome {
    Updated,
    /// The entry already has this value.
    Unchanged,
    /// The key is protected and has another value.
    Duplicate,
    /// The key is too long, or a limit on entries or bytes is reached.
    Full,
}

#[derive(Clone, Debug)]
struct MetadataEntry {
    value: Bytes,
    /// Whether it was written before this start.
    restored: bool,
}

/// Entries by key, with their total size.
#[derive(Debug, Default)]
pub(crate) struct MetadataTable {
    by_key: HashMap<String, MetadataEntry>,
    bytes: usize,
}

impl MetadataTable {
    fn insert(&mut self, key: &str, entry: MetadataEntry) {
        self.bytes += key.len() + entry.value.len();
        let old = self.by_key.insert(key.to_owned(), entry);
        self.bytes -= old.map_or(0, |old| key.len() + old.value.len());
    }

    fn remove(&mut self, key: &str) -> bool {
        let Some(old) = self.by_key.remove(key) else { return false };
        self.bytes -= key.len() + old.value.len();
        true
    }

    /// Passes every entry as an encoded record to `each`.
    pub(crate) fn for_each_record(&self, mut each: impl FnMut(&[u8])) {
        for (key, entry) in &self.by_key {
            each(&MetadataRecord::Put { key, value: &entry.value }.encode());
        }
    }

    pub(crate) fn apply(&mut self, record: &[u8]) {
        match MetadataRecord::decode(record) {
            Some(MetadataRecord::Put { key, value }) => {
                self.insert(key, MetadataEntry { value: Bytes::copy_from_slice(value), restored: true });
            }
            Some(MetadataRecord::Delete { key }) => {
                self.remove(key);
            }
            None => tracing::error!("skipping an unknown transfer metadata record"),
        }
    }
}

#[derive(Debug)]
struct MetadataLog {
    folder: Arc<LogDirectory>,
    log: OperationLog,
    /// Size of the log since the last compaction.
    bytes_since_compaction: AtomicU64,
    compaction: Mutex<()>,
}

/// Where changes are persisted.
#[derive(Default)]
enum MetadataPersistence {
    /// Not persisted, lost at the end of the process.
    #[default]
    Memory,
    /// In a separate log.
    Folder(Box<MetadataLog>),
    /// In the journal of the master's state; the number is that of the last record.
    Journal(Arc<dyn Journal>, AtomicU64),
}

/// Transfer metadata entries. Lock order: entries, then the log.
#[derive(Default)]
pub struct MetadataStore {
    entries: Arc<Mutex<MetadataTable>>,
    persistence: MetadataPersistence,
}

impl MetadataStore {
    /// A store without persistence.
    pub fn in_memory() -> Self {
        Self::default()
    }

    /// A store whose entries are part of the master's state and whose changes go to its journal.
    pub(crate) fn in_journal(entries: Arc<Mutex<MetadataTable>>, journal: Arc<dyn Journal>) -> Self {
        entries.lock().by_key.values_mut().for_each(|entry| entry.restored = true);
        Self { entries, persistence: MetadataPersistence::Journal(journal, AtomicU64::new(0)) }
    }

    /// A store with the entries of a folder, which is created if necessary.
    ///
    /// # Errors
    /// [`MetadataStoreError`].
    pub fn open(path: &Path) -> Result<Self, MetadataStoreError> {
        let folder = Arc::new(LogDirectory::lock(path)?);
        let mut entries = MetadataTable::default();
        let mut last = 0;
        if let Some((number, file)) = snapshot::list(&folder)?.into_iter().next() {
            snapshot::read(&folder, &file, |record| entries.apply(record))?;
            last = number;
        }
        // Changes are rare, and a client registers only once, so every change is flushed.
        let options = OplogOptions { flush_always: true, ..OplogOptions::default() };
        let (log, opened) = OperationLog::open(Arc::clone(&folder), options)?;
        if opened.first > last + 1 {
            return Err(MetadataStoreError::Gap { snapshot: last, log: opened.first });
        }
        let mut log_bytes = 0;
        let mut apply = |from: u64, through: u64| -> Result<(), MetadataStoreError> {
            let mut reader = log.reader(from)?;
            while let Some((number, record)) = reader.next()? {
                log_bytes += record.len() as u64;
                entries.apply(record);
                if number >= through {
                    break;
                }
            }
            Ok(())
        };
        let from = last + 1;
        match opened.damage.filter(|_| opened.contiguous_from > from) {
            None => apply(from, u64::MAX)?,
            Some(damage) => {
                // A stale entry causes a failed transfer, a missing one an unreachable client.
                let preserved = folder.preserve()?;
                tracing::warn!(preserved_at = %preserved.display(), "lost transfer metadata changes: {damage}");
                if damage.readable_to >= from {
                    apply(from, damage.readable_to)?;
                }
                apply(opened.contiguous_from, u64::MAX)?;
            }
        }
        let folder_log = MetadataLog {
            folder,
            log,
            bytes_since_compaction: AtomicU64::new(log_bytes),
            compaction: Mutex::new(()),
        };
        Ok(Self {
            entries: Arc::new(Mutex::new(entries)),
            persistence: MetadataPersistence::Folder(Box::new(folder_log)),
        })
    }

    /// The value of an entry.
    pub fn get(&self, key: &str) -> Option<Bytes> {
        self.entries.lock().by_key.get(key).map(|entry| entry.value.clone())
    }

    /// Writes an entry. It is durable once [`Self::commit`] has returned.
    pub fn put(&self, key: &str, value: &Bytes) -> MetadataPutOutcome {
        let mut entries = self.entries.lock();
        let existing = entries.by_key.get(key);
        if key.contains(UNIQUE_KEY_MARKER)
            && let Some(existing) = existing
        {
            if existing.value == *value {
                return MetadataPutOutcome::Unchanged;
            }
            if !existing.restored {
                return MetadataPutOutcome::Duplicate;
            }
        }
        let is_new = existing.is_none();
        let bytes = entries.bytes + key.len() + value.len();
        if key.len() > MAX_KEY || bytes > MAX_BYTES || is_new && entries.by_key.len() >= MAX_ENTRIES {
            return MetadataPutOutcome::Full;
        }
        self.append(MetadataRecord::Put { key, value });
        // A copy, because a slice would keep the whole request buffer alive.
        entries.insert(key, MetadataEntry { value: Bytes::copy_from_slice(value), restored: false });
        MetadataPutOutcome::Updated
    }

    /// Removes an entry and returns whether it existed. The removal is durable once [`Self::commit`] has returned.
    pub fn delete(&self, key: &str) -> bool {
        let mut entries = self.entries.lock();
        let existed = entries.remove(key);
        if existed {
            self.append(MetadataRecord::Delete { key });
        }
        existed
    }

    /// Removes all entries of an expired node and returns their number. Durability is as for [`Self::delete`].
    pub fn remove_node(&self, name: &str) -> usize {
        let is_of_node = |key: &&String| {
            ["/ram/", "/rpc_meta/"]
                .iter()
                .any(|kind| key.strip_suffix(name).is_some_and(|key| key.ends_with(kind)))
        };
        let keys: Vec<String> = self.entries.lock().by_key.keys().filter(is_of_node).cloned().collect();
        keys.iter().filter(|key| self.delete(key)).count()
    }

    fn append(&self, change: MetadataRecord<'_>) {
        match &self.persistence {
            MetadataPersistence::Memory => {}
            MetadataPersistence::Folder(folder_log) => {
                let change = change.encode();
                folder_log.log.append(&change);
                folder_log.bytes_since_compaction.fetch_add(change.len() as u64, Relaxed);
            }
            MetadataPersistence::Journal(journal, last) => {
                last.fetch_max(journal.append(&record::metadata(&change.encode())), Relaxed);
            }
        }
    }

    /// Blocks until all changes are durable.
    ///
    /// # Errors
    /// The changes could not be persisted. The next commit retries.
    pub fn commit(&self) -> io::Result<()> {
        match &self.persistence {
            MetadataPersistence::Memory => Ok(()),
            MetadataPersistence::Folder(folder_log) => self.commit_to(folder_log).map_err(io::Error::other),
            MetadataPersistence::Journal(journal, last) => journal.commit(last.load(Relaxed)),
        }
    }

    fn commit_to(&self, folder_log: &MetadataLog) -> Result<(), moongate_oplog::OplogError> {
        folder_log.log.commit(folder_log.log.next() - 1)?;
        if folder_log.bytes_since_compaction.load(Relaxed)
            > COMPACTION_BYTES.max(self.entries.lock().bytes as u64)
            && let Some(_compacting) = folder_log.compaction.try_lock()
        {
            self.compact(folder_log)?;
        }
        Ok(())
    }

    /// Writes a snapshot and prunes the log.
    fn compact(&self, folder_log: &MetadataLog) -> Result<(), moongate_oplog::OplogError> {
        let (last, entries) = {
            let entries = self.entries.lock();
            (folder_log.log.next() - 1, entries.by_key.clone())
        };
        folder_log.bytes_since_compaction.store(0, Relaxed);
        let mut writer = snapshot::SnapshotWriter::begin(Arc::clone(&folder_log.folder), last)?;
        for (key, entry) in &entries {
            writer.write(&MetadataRecord::Put { key, value: &entry.value }.encode())?;
        }
        let needed = writer.finish()?;
        folder_log.log.commit(last)?;
        folder_log.log.prune(needed)
    }

    pub fn count(&self) -> usize {
        self.entries.lock().by_key.len()
    }
}

impl std::fmt::Debug for MetadataStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetadataStore").field("entries", &self.count()).finish_non_exhaustive()
    }
}

impl Drop for MetadataStore {
    fn drop(&mut self) {
        if let MetadataPersistence::Folder(folder_log) = &self.persistence
            && let Err(error) = folder_log.log.close()
        {
            tracing::error!(%error, "cannot close the metadata log");
        }
    }
}
