//! A storage in memory that crashes at a chosen write.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use crate::storage::{BlobStore, BlobWriter, StorageError};

#[derive(Debug, Clone, Default)]
pub(crate) struct TestStore {
    state: Arc<Mutex<StoreState>>,
}

#[derive(Debug, Default)]
struct StoreState {
    blobs: BTreeMap<String, Bytes>,
    /// Writes and deletions so far.
    changes: usize,
    /// The change after which every operation fails, and whether it takes effect itself.
    crash_at: Option<(usize, bool)>,
}

struct TestWriter {
    store: TestStore,
    key: String,
    content: BytesMut,
}

impl TestStore {
    /// The same blobs after a crash, which happens at the change with this number, before or after it took effect.
    pub(crate) fn restart(&self, crash_at: Option<(usize, bool)>) -> Self {
        let blobs = self.state.lock().blobs.clone();
        Self { state: Arc::new(Mutex::new(StoreState { blobs, changes: 0, crash_at })) }
    }

    pub(crate) fn changes(&self) -> usize {
        self.state.lock().changes
    }

    pub(crate) fn has_crashed(&self) -> bool {
        let state = self.state.lock();
        state.crash_at.is_some_and(|(at, _)| state.changes > at)
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.state.lock().blobs.keys().cloned().collect()
    }

    /// Flips a bit in the middle of a blob.
    pub(crate) fn damage(&self, key: &str) {
        let mut state = self.state.lock();
        let mut content = state.blobs[key].to_vec();
        let middle = content.len() / 2;
        content[middle] ^= 1;
        state.blobs.insert(key.to_owned(), content.into());
    }

    fn change(
        &self,
        key: &str,
        change: impl FnOnce(&mut BTreeMap<String, Bytes>),
    ) -> Result<(), StorageError> {
        let mut state = self.state.lock();
        let number = state.changes;
        state.changes += 1;
        match state.crash_at {
            Some((at, takes_effect)) if number >= at => {
                if number == at && takes_effect {
                    change(&mut state.blobs);
                }
                Err(crashed(key))
            }
            _ => {
                change(&mut state.blobs);
                Ok(())
            }
        }
    }
}

fn crashed(key: &str) -> StorageError {
    StorageError::Io { key: key.to_owned(), source: std::io::Error::other("crashed") }
}

#[async_trait]
impl BlobStore for TestStore {
    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.change(key, |blobs| drop(blobs.insert(key.to_owned(), content)))
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn BlobWriter>, StorageError> {
        Ok(Box::new(TestWriter { store: self.clone(), key: key.to_owned(), content: BytesMut::new() }))
    }

    async fn read(&self, key: &str, offset: u64, limit: usize) -> Result<Bytes, StorageError> {
        if self.has_crashed() {
            return Err(crashed(key));
        }
        let state = self.state.lock();
        let blob = state.blobs.get(key).ok_or_else(|| StorageError::NotFound(key.to_owned()))?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(blob.len());
        Ok(blob.slice(start..start.saturating_add(limit).min(blob.len())))
    }

    async fn delete(&self, key: &str) -> Result<(), StorageError> {
        self.change(key, |blobs| drop(blobs.remove(key)))
    }

    async fn list(&self, group: &str) -> Result<Vec<String>, StorageError> {
        let prefix = format!("{group}/");
        Ok(self.keys().iter().filter_map(|key| key.strip_prefix(&prefix)).map(str::to_owned).collect())
    }
}

#[async_trait]
impl BlobWriter for TestWriter {
    async fn write(&mut self, part: Bytes) -> Result<(), StorageError> {
        self.content.extend_from_slice(&part);
        Ok(())
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StorageError> {
        let content = self.content.split().freeze();
        self.store.put(&self.key, content).await
    }
}
