//! The records of all files and batches, in memory and in the storage.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;

use crate::batch::{self, BATCHES, BatchEvent, BatchRecord, BatchStatus, InvalidTransition};
use crate::error::BatchError;
use crate::file::{self, FILES, FileBlob, FileRecord};
use crate::record::{decode, encode};
use crate::storage::{BlobStore, StorageError};

/// Most files, of all tenants.
pub(crate) const MAX_FILES: usize = 20_000;
/// Most batches, of all tenants; finished ones are removed after a time.
pub(crate) const MAX_BATCHES: usize = 10_000;
/// Largest record that is read: the problems and metadata of a batch are bounded.
const MAX_RECORD_BYTES: usize = 4 << 20;
/// Records that are read at the same time.
const CONCURRENT_READS: usize = 16;

/// Which part of a list is requested.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageQuery {
    /// Id of the last object of the previous page.
    pub after: Option<String>,
    pub limit: usize,
    /// Oldest first instead of newest first.
    pub ascending: bool,
}

/// Part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectPage<T> {
    pub items: Vec<T>,
    /// Whether there are objects after these.
    pub has_more: bool,
}

/// Why a batch does not change its state.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransitionError {
    #[error(transparent)]
    Invalid(#[from] InvalidTransition),
    #[error(transparent)]
    Batch(#[from] BatchError),
}

#[derive(Debug, Default)]
struct CatalogState {
    files: BTreeMap<String, FileRecord>,
    batches: BTreeMap<String, BatchRecord>,
    /// Objects whose stored state is damaged, with the reason.
    damaged: BTreeMap<String, String>,
}

/// Records of files and batches. What it returns is durable.
#[derive(Debug)]
pub(crate) struct Catalog {
    store: Arc<dyn BlobStore>,
    state: Mutex<CatalogState>,
    /// Held while a record is checked, stored and published.
    writing: tokio::sync::Mutex<()>,
}

impl Catalog {
    /// Reads all records. A damaged one is reported and kept as it is; unreadable storage is an error.
    pub(crate) async fn load(store: Arc<dyn BlobStore>) -> Result<Self, StorageError> {
        let mut state = CatalogState::default();
        let (mut records, mut contents) = (Vec::new(), BTreeSet::new());
        for name in store.list(FILES).await? {
            match FileBlob::of_name(&name) {
                Some(FileBlob::Record { id }) => records.push((file::record_key(&id), id)),
                Some(FileBlob::Content { id }) => drop(contents.insert(id)),
                None => {}
            }
        }
        state.files = state.read_all(&*store, records).await?;
        for id in state.files.keys().filter(|id| !contents.contains(*id)).cloned().collect::<Vec<_>>() {
            state.files.remove(&id);
            state.report(id, "its content is missing");
        }
        let names = store.list(BATCHES).await?;
        let ids = names.iter().filter_map(|name| batch::id_of_name(name));
        let records = ids.map(|id| (batch::record_key(id), id.to_owned())).collect();
        state.batches = state.read_all(&*store, records).await?;
        // A content without a record is from an upload that did not end.
        for id in contents {
            if !state.files.contains_key(&id) && !state.damaged.contains_key(&id) {
                store.delete(&file::content_key(&id)).await?;
            }
        }
        Ok(Self { store, state: Mutex::new(state), writing: tokio::sync::Mutex::default() })
    }

    pub(crate) fn store(&self) -> &dyn BlobStore {
        &*self.store
    }

    pub(crate) fn damaged(&self) -> usize {
        self.state.lock().damaged.len()
    }

    /// Bytes of all files' contents.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.state.lock().files.values().map(|file| file.bytes).sum()
    }

    pub(crate) fn batches_by_status(&self) -> BTreeMap<BatchStatus, usize> {
        let mut counts: BTreeMap<_, _> = BatchStatus::ALL.map(|status| (status, 0)).into();
        for batch in self.state.lock().batches.values() {
            *counts.entry(batch.status).or_default() += 1;
        }
        counts
    }

    /// A file of the tenant.
    pub(crate) fn file(&self, tenant: &str, id: &str) -> Result<FileRecord, BatchError> {
        let state = self.state.lock();
        state.check_damage(id)?;
        let file = state.files.get(id).filter(|file| file.tenant == tenant);
        file.cloned().ok_or_else(|| BatchError::NoSuchFile(id.to_owned()))
    }

    /// A batch of the tenant.
    pub(crate) fn batch(&self, tenant: &str, id: &str) -> Result<BatchRecord, BatchError> {
        self.any_batch(id).and_then(|batch| {
            Some(batch)
                .filter(|batch| batch.tenant == tenant)
                .ok_or_else(|| BatchError::NoSuchBatch(id.to_owned()))
        })
    }

    /// A batch of any tenant.
    pub(crate) fn any_batch(&self, id: &str) -> Result<BatchRecord, BatchError> {
        let state = self.state.lock();
        state.check_damage(id)?;
        state.batches.get(id).cloned().ok_or_else(|| BatchError::NoSuchBatch(id.to_owned()))
    }

    /// The input of a batch, which exists while the batch needs it.
    pub(crate) fn input_of(&self, batch: &BatchRecord) -> Result<FileRecord, BatchError> {
        self.file(&batch.tenant, &batch.input_file)
    }

    /// Files of the tenant, of this purpose if it is given.
    pub(crate) fn files(
        &self,
        tenant: &str,
        purpose: Option<&str>,
        query: &PageQuery,
    ) -> Result<ObjectPage<FileRecord>, BatchError> {
        let state = self.state.lock();
        let wanted = |file: &FileRecord| purpose.is_none_or(|purpose| purpose == file.purpose.as_str());
        page(state.files.iter().filter(|(_, file)| file.tenant == tenant && wanted(file)), query)
    }

    pub(crate) fn batches(
        &self,
        tenant: &str,
        query: &PageQuery,
    ) -> Result<ObjectPage<BatchRecord>, BatchError> {
        let state = self.state.lock();
        page(state.batches.iter().filter(|(_, batch)| batch.tenant == tenant), query)
    }

    /// Ids of batches that are not final, oldest first.
    pub(crate) fn unfinished_batches(&self) -> Vec<String> {
        let state = self.state.lock();
        let unfinished = state.batches.values().filter(|batch| !batch.status.is_final());
        unfinished.map(|batch| batch.id.clone()).collect()
    }

    /// Ids of batches that ended before `time`, in Unix seconds.
    pub(crate) fn batches_ended_before(&self, time: u64) -> Vec<String> {
        let state = self.state.lock();
        let ended = state.batches.values().filter(|batch| batch.ended_at().is_some_and(|at| at < time));
        ended.map(|batch| batch.id.clone()).collect()
    }

    /// Whether results of this batch may still be needed.
    pub(crate) fn needs_results(&self, id: &str) -> bool {
        let state = self.state.lock();
        state.damaged.contains_key(id) || state.batches.get(id).is_some_and(|batch| !batch.status.is_final())
    }

    /// Stores an uploaded file, if there is room for it within `max_bytes` of all files.
    pub(crate) async fn create_file(
        &self,
        record: FileRecord,
        content: Bytes,
        max_bytes: u64,
    ) -> Result<FileRecord, BatchError> {
        self.check_room(record.bytes, max_bytes)?;
        // Not under the lock, which must not wait for a large file.
        self.store.put(&record.content_key(), content).await?;
        let _writing = self.writing.lock().await;
        if let Err(error) = self.check_room(record.bytes, max_bytes) {
            self.store.delete(&record.content_key()).await?;
            return Err(error);
        }
        self.publish_file(record).await
    }

    fn check_room(&self, bytes: u64, max_bytes: u64) -> Result<(), BatchError> {
        let text = if self.stored_bytes().saturating_add(bytes) > max_bytes {
            format!("the files of this gateway would exceed {max_bytes} bytes (--batch-max-stored-bytes)")
        } else if self.state.lock().files.len() >= MAX_FILES {
            format!("this gateway has {MAX_FILES} files, which is the limit")
        } else {
            return Ok(());
        };
        Err(BatchError::Full(format!("{text}; delete some with DELETE /v1/files/{{id}}")))
    }

    /// Adds the record of a file whose content is stored; replaces one with its id.
    pub(crate) async fn register_file(&self, record: FileRecord) -> Result<FileRecord, BatchError> {
        let _writing = self.writing.lock().await;
        self.publish_file(record).await
    }

    async fn publish_file(&self, record: FileRecord) -> Result<FileRecord, BatchError> {
        self.store.put(&file::record_key(&record.id), encode(&record)?).await?;
        self.state.lock().files.insert(record.id.clone(), record.clone());
        Ok(record)
    }

    /// Deletes a file that no unfinished batch needs.
    pub(crate) async fn delete_file(&self, tenant: &str, id: &str) -> Result<(), BatchError> {
        let _writing = self.writing.lock().await;
        self.file(tenant, id)?;
        let user = {
            let state = self.state.lock();
            let mut batches = state.batches.values();
            batches
                .find(|batch| !batch.status.is_final() && batch.input_file == id)
                .map(|batch| batch.id.clone())
        };
        if let Some(batch) = user {
            let text = format!("{id} is the input of {batch}, which has not ended; cancel it first");
            return Err(BatchError::invalid("file_id", text));
        }
        // Without a record, the rest of the file is removed at the next start.
        self.store.delete(&file::record_key(id)).await?;
        self.state.lock().files.remove(id);
        Ok(self.store.delete(&file::content_key(id)).await?)
    }

    pub(crate) async fn create_batch(&self, record: BatchRecord) -> Result<BatchRecord, BatchError> {
        let _writing = self.writing.lock().await;
        self.input_of(&record)?;
        if self.state.lock().batches.len() >= MAX_BATCHES {
            let text = format!("there are {MAX_BATCHES} batches; wait until older ones are removed");
            return Err(BatchError::Full(text));
        }
        self.publish_batch(record).await
    }

    async fn publish_batch(&self, record: BatchRecord) -> Result<BatchRecord, BatchError> {
        self.store.put(&batch::record_key(&record.id), encode(&record)?).await?;
        self.state.lock().batches.insert(record.id.clone(), record.clone());
        Ok(record)
    }

    /// Applies an event to a batch at `now`, in Unix seconds.
    pub(crate) async fn transition(
        &self,
        id: &str,
        event: BatchEvent,
        now: u64,
    ) -> Result<BatchRecord, TransitionError> {
        let _writing = self.writing.lock().await;
        let mut record = self.any_batch(id)?;
        let before = record.status;
        record.apply(event, now)?;
        if record.status != before {
            tracing::info!(batch = id, from = %before, to = %record.status, "batch");
        }
        Ok(self.publish_batch(record).await?)
    }

    /// Removes a batch that has ended. Its files stay.
    pub(crate) async fn remove_batch(&self, id: &str) -> Result<(), BatchError> {
        let _writing = self.writing.lock().await;
        self.store.delete(&batch::record_key(id)).await?;
        self.state.lock().batches.remove(id);
        Ok(())
    }
}

impl CatalogState {
    /// Reads records, given as key and id, without those that are damaged.
    async fn read_all<T: DeserializeOwned>(
        &mut self,
        store: &dyn BlobStore,
        keys: Vec<(String, String)>,
    ) -> Result<BTreeMap<String, T>, StorageError> {
        let reads = keys.into_iter().map(|(key, id)| async move {
            let framed = store.read(&key, 0, MAX_RECORD_BYTES).await;
            (id, framed)
        });
        let mut reads = stream::iter(reads).buffered(CONCURRENT_READS);
        let mut records = BTreeMap::new();
        while let Some((id, framed)) = reads.next().await {
            match decode(&framed?) {
                Ok(record) => drop(records.insert(id, record)),
                Err(damage) => self.report(id, &damage.to_string()),
            }
        }
        Ok(records)
    }

    fn report(&mut self, id: String, reason: &str) {
        tracing::error!(%id, reason, "the stored state of a file or batch is damaged; it is left as it is");
        self.damaged.insert(id, reason.to_owned());
    }

    fn check_damage(&self, id: &str) -> Result<(), BatchError> {
        match self.damaged.get(id) {
            None => Ok(()),
            Some(reason) => Err(BatchError::Damaged { id: id.to_owned(), reason: reason.clone() }),
        }
    }
}

/// The requested part of these objects, which are in order of id.
fn page<'a, T: Clone + 'a>(
    objects: impl DoubleEndedIterator<Item = (&'a String, &'a T)>,
    query: &PageQuery,
) -> Result<ObjectPage<T>, BatchError> {
    let mut objects: Vec<_> = if query.ascending { objects.collect() } else { objects.rev().collect() };
    if let Some(after) = &query.after {
        let position = objects.iter().position(|(id, _)| *id == after).ok_or_else(|| {
            BatchError::invalid("after", format!("`after` is {after:?}, which is not an id of this list"))
        })?;
        objects.drain(..=position);
    }
    let has_more = objects.len() > query.limit;
    let items = objects.into_iter().take(query.limit).map(|(_, object)| object.clone()).collect();
    Ok(ObjectPage { items, has_more })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_in_both_orders() {
        let objects: BTreeMap<String, u32> = (0..5).map(|number| (format!("id{number}"), number)).collect();
        let mut query = PageQuery { limit: 2, ..PageQuery::default() };
        let mut seen: Vec<u32> = Vec::new();
        loop {
            let page = page(objects.iter(), &query).unwrap();
            seen.extend(&page.items);
            if !page.has_more {
                break;
            }
            query.after = page.items.last().map(|number| format!("id{number}"));
        }
        assert_eq!(seen, [4, 3, 2, 1, 0]);
        let ascending = PageQuery { after: Some("id3".to_owned()), limit: 9, ascending: true };
        assert_eq!(page(objects.iter(), &ascending).unwrap().items, [4]);
        query.after = Some("other".to_owned());
        assert!(matches!(page(objects.iter(), &query), Err(BatchError::Invalid { param: "after", .. })));
    }
}
