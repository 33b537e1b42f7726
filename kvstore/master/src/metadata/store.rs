//! Entries, in memory and in a folder.

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

/// Longest key, in bytes.
const MAX_KEY: usize = 4096;
/// Entries at most.
const MAX_ENTRIES: usize = 1 << 18;
/// Bytes of all entries at most.
const MAX_BYTES: usize = 256 << 20;
/// Bytes of changes after which the folder is tidied, unless the entries themselves are larger.
const COMPACTION_BYTES: u64 = 4 << 20;
/// Marks keys that must not be written twice: by which address a client can be asked. Whoever has the same key is the same client, or a
/// second one under the same name.
const UNIQUE_KEY_MARKER: &str = "rpc_meta";

/// The metadata cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum MetadataStoreError {
    /// The folder cannot be used.
    #[error("the metadata's folder: {0}")]
    Log(#[from] moongate_oplog::OplogError),
    /// The log begins after what the newest snapshot contains.
    #[error(
        "the metadata's folder has a gap: the snapshot ends with change {snapshot}, the log begins with {log}; move it away to begin anew"
    )]
    Gap {
        /// The last change that the snapshot contains.
        snapshot: u64,
        /// The first change in the log.
        log: u64,
    },
}

/// What became of an entry that somebody wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataPutOutcome {
    /// It is there.
    Updated,
    /// It was there already.
    Unchanged,
    /// Another client has that key.
    Duplicate,
    /// The key is too long, or there are too many entries.
    Full,
}

#[derive(Clone, Debug)]
struct MetadataEntry {
    value: Bytes,
    /// Whether it comes from a former master.
    restored: bool,
}

/// Entries by key.
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

    /// Tells each as a change.
    pub(crate) fn for_each_record(&self, mut each: impl FnMut(&[u8])) {
        for (key, entry) in &self.by_key {
            each(&MetadataRecord::Put { key, value: &entry.value }.encode());
        }
    }

    /// Makes a change true.
    pub(crate) fn apply(&mut self, record: &[u8]) {
        match MetadataRecord::decode(record) {
            Some(MetadataRecord::Put { key, value }) => {
                self.insert(key, MetadataEntry { value: Bytes::copy_from_slice(value), restored: true });
            }
            Some(MetadataRecord::Delete { key }) => {
                self.remove(key);
            }
            None => tracing::error!("a change of the metadata is not understood, and is passed over"),
        }
    }
}

#[derive(Debug)]
struct MetadataLog {
    folder: Arc<LogDirectory>,
    log: OperationLog,
    /// Bytes of changes since the folder was tidied.
    bytes_since_compaction: AtomicU64,
    compaction: Mutex<()>,
}

/// Where changes go.
#[derive(Default)]
enum MetadataPersistence {
    /// Nowhere.
    #[default]
    Memory,
    /// Into a log of their own.
    Folder(Box<MetadataLog>),
    /// Into the journal of the master's state; the last that went there.
    Journal(Arc<dyn Journal>, AtomicU64),
}

/// Entries by key. The order of locks is: entries, then the log.
#[derive(Default)]
pub struct MetadataStore {
    entries: Arc<Mutex<MetadataTable>>,
    persistence: MetadataPersistence,
}

impl MetadataStore {
    /// Without entries; they end with the process.
    pub fn in_memory() -> Self {
        Self::default()
    }

    /// With entries that belong to the master's state, in whose journal changes go.
    pub(crate) fn in_journal(entries: Arc<Mutex<MetadataTable>>, journal: Arc<dyn Journal>) -> Self {
        entries.lock().by_key.values_mut().for_each(|it| it.restored = true);
        Self { entries, persistence: MetadataPersistence::Journal(journal, AtomicU64::new(0)) }
    }

    /// With the entries that are kept in a folder, which is made if it is not there.
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
        // There are few changes, and a client does not tell again what it has told once: each is flushed.
        let options = OplogOptions { flush_always: true, ..OplogOptions::default() };
        let (log, opened) = OperationLog::open(Arc::clone(&folder), options)?;
        if opened.first > last + 1 {
            return Err(MetadataStoreError::Gap { snapshot: last, log: opened.first });
        }
        let mut grown = 0;
        let mut apply = |from: u64, through: u64| -> Result<(), MetadataStoreError> {
            let mut reader = log.reader(from)?;
            while let Some((number, record)) = reader.next()? {
                grown += record.len() as u64;
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
                // An entry that is too old costs a failed transfer, and one that is missing a client that cannot be reached.
                let kept = folder.preserve()?;
                tracing::warn!(kept = %kept.display(), "changes of the metadata are lost: {damage}");
                if damage.readable_to >= from {
                    apply(from, damage.readable_to)?;
                }
                apply(opened.contiguous_from, u64::MAX)?;
            }
        }
        let kept = MetadataLog {
            folder,
            log,
            bytes_since_compaction: AtomicU64::new(grown),
            compaction: Mutex::new(()),
        };
        Ok(Self {
            entries: Arc::new(Mutex::new(entries)),
            persistence: MetadataPersistence::Folder(Box::new(kept)),
        })
    }

    /// An entry's value.
    pub fn get(&self, key: &str) -> Option<Bytes> {
        self.entries.lock().by_key.get(key).map(|entry| entry.value.clone())
    }

    /// Writes an entry. It is kept once [`Self::commit`] has returned.
    pub fn put(&self, key: &str, value: &Bytes) -> MetadataPutOutcome {
        let mut entries = self.entries.lock();
        let known = entries.by_key.get(key);
        if key.contains(UNIQUE_KEY_MARKER)
            && let Some(known) = known
        {
            if known.value == *value {
                return MetadataPutOutcome::Unchanged;
            }
            if !known.restored {
                return MetadataPutOutcome::Duplicate;
            }
        }
        let is_new = known.is_none();
        let bytes = entries.bytes + key.len() + value.len();
        if key.len() > MAX_KEY || bytes > MAX_BYTES || is_new && entries.by_key.len() >= MAX_ENTRIES {
            return MetadataPutOutcome::Full;
        }
        self.append(MetadataRecord::Put { key, value });
        // A copy, because a slice would keep the buffer that the request was read into.
        entries.insert(key, MetadataEntry { value: Bytes::copy_from_slice(value), restored: false });
        MetadataPutOutcome::Updated
    }

    /// Removes an entry, and says whether there was one. It stays away once [`Self::commit`] has returned.
    pub fn delete(&self, key: &str) -> bool {
        let mut entries = self.entries.lock();
        let found = entries.remove(key);
        if found {
            self.append(MetadataRecord::Delete { key });
        }
        found
    }

    /// Removes all entries of a node whose client is gone, and returns how many. As [`Self::delete`].
    pub fn remove_node(&self, name: &str) -> usize {
        let is_of = |key: &&String| {
            ["/ram/", "/rpc_meta/"]
                .iter()
                .any(|kind| key.strip_suffix(name).is_some_and(|key| key.ends_with(kind)))
        };
        let keys: Vec<String> = self.entries.lock().by_key.keys().filter(is_of).cloned().collect();
        keys.iter().filter(|key| self.delete(key)).count()
    }

    fn append(&self, change: MetadataRecord<'_>) {
        match &self.persistence {
            MetadataPersistence::Memory => {}
            MetadataPersistence::Folder(kept) => {
                let change = change.encode();
                kept.log.append(&change);
                kept.bytes_since_compaction.fetch_add(change.len() as u64, Relaxed);
            }
            MetadataPersistence::Journal(journal, last) => {
                last.fetch_max(journal.append(&record::metadata(&change.encode())), Relaxed);
            }
        }
    }

    /// Waits until all changes are kept. Blocks.
    ///
    /// # Errors
    /// When they cannot be kept. The changes are tried again with the next ones.
    pub fn commit(&self) -> io::Result<()> {
        match &self.persistence {
            MetadataPersistence::Memory => Ok(()),
            MetadataPersistence::Folder(kept) => self.commit_to(kept).map_err(io::Error::other),
            MetadataPersistence::Journal(journal, last) => journal.commit(last.load(Relaxed)),
        }
    }

    fn commit_to(&self, kept: &MetadataLog) -> Result<(), moongate_oplog::OplogError> {
        kept.log.commit(kept.log.next() - 1)?;
        if kept.bytes_since_compaction.load(Relaxed) > COMPACTION_BYTES.max(self.entries.lock().bytes as u64)
            && let Some(_tidying) = kept.compaction.try_lock()
        {
            self.compact(kept)?;
        }
        Ok(())
    }

    /// Writes a snapshot, and removes what it contains from the log.
    fn compact(&self, kept: &MetadataLog) -> Result<(), moongate_oplog::OplogError> {
        let (last, entries) = {
            let entries = self.entries.lock();
            (kept.log.next() - 1, entries.by_key.clone())
        };
        kept.bytes_since_compaction.store(0, Relaxed);
        let mut writer = snapshot::SnapshotWriter::begin(Arc::clone(&kept.folder), last)?;
        for (key, entry) in &entries {
            writer.write(&MetadataRecord::Put { key, value: &entry.value }.encode())?;
        }
        let needed = writer.finish()?;
        kept.log.commit(last)?;
        kept.log.prune(needed)
    }

    /// Entries.
    pub fn count(&self) -> usize {
        self.entries.lock().by_key.len()
    }
}

impl std::fmt::Debug for MetadataStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metadata").field("entries", &self.count()).finish_non_exhaustive()
    }
}

impl Drop for MetadataStore {
    fn drop(&mut self) {
        if let MetadataPersistence::Folder(kept) = &self.persistence
            && let Err(error) = kept.log.close()
        {
            tracing::error!(%error, "the metadata's log cannot be closed");
        }
    }
}
