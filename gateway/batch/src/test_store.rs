//! Storage for tests: in memory, and one that crashes at a chosen write of any other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use crate::storage::{BlobStore, BlobWriter, StorageError};

#[derive(Debug, Clone, Default)]
pub(crate) struct TestStore {
    blobs: Arc<Mutex<BTreeMap<String, Bytes>>>,
    reads: Arc<AtomicUsize>,
}

impl TestStore {
    /// A store with the same blobs.
    pub(crate) fn copy(&self) -> Self {
        Self { blobs: Arc::new(Mutex::new(self.blobs.lock().clone())), reads: Arc::default() }
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.blobs.lock().keys().cloned().collect()
    }

    pub(crate) fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }

    /// Flips a bit in the middle of a blob.
    pub(crate) fn damage(&self, key: &str) {
        let mut blobs = self.blobs.lock();
        let mut content = blobs[key].to_vec();
        let middle = content.len() / 2;
        content[middle] ^= 1;
        blobs.insert(key.to_owned(), content.into());
    }
}

struct TestWriter {
    store: TestStore,
    key: String,
    content: BytesMut,
}

#[async_trait]
impl BlobStore for TestStore {
    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.blobs.lock().insert(key.to_owned(), content);
        Ok(())
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn BlobWriter>, StorageError> {
        Ok(Box::new(TestWriter { store: self.clone(), key: key.to_owned(), content: BytesMut::new() }))
    }

    async fn read(&self, key: &str, offset: u64, limit: usize) -> Result<Bytes, StorageError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let blobs = self.blobs.lock();
        let blob = blobs.get(key).ok_or_else(|| StorageError::NotFound(key.to_owned()))?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(blob.len());
        Ok(blob.slice(start..start.saturating_add(limit).min(blob.len())))
    }

    async fn delete(&self, key: &str) -> Result<(), StorageError> {
        self.blobs.lock().remove(key);
        Ok(())
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

/// Passes on operations to another store until it crashes.
#[derive(Debug, Clone)]
pub(crate) struct CrashingStore {
    inner: Arc<dyn BlobStore>,
    /// Writes and deletions so far.
    changes: Arc<AtomicUsize>,
    /// The change after which every operation fails, and whether it takes effect itself.
    crash_at: Option<(usize, bool)>,
}

struct CrashingWriter {
    store: CrashingStore,
    key: String,
    inner: Box<dyn BlobWriter>,
}

impl CrashingStore {
    pub(crate) fn new(inner: Arc<dyn BlobStore>, crash_at: Option<(usize, bool)>) -> Self {
        Self { inner, changes: Arc::default(), crash_at }
    }

    pub(crate) fn changes(&self) -> usize {
        self.changes.load(Ordering::SeqCst)
    }

    pub(crate) fn has_crashed(&self) -> bool {
        self.crash_at.is_some_and(|(at, _)| self.changes() > at)
    }

    async fn change<T>(
        &self,
        key: &str,
        change: impl Future<Output = Result<T, StorageError>>,
    ) -> Result<T, StorageError> {
        let number = self.changes.fetch_add(1, Ordering::SeqCst);
        match self.crash_at {
            Some((at, takes_effect)) if number >= at => {
                if number == at && takes_effect {
                    change.await?;
                }
                Err(crashed(key))
            }
            _ => change.await,
        }
    }

    fn check(&self, key: &str) -> Result<(), StorageError> {
        if self.has_crashed() { Err(crashed(key)) } else { Ok(()) }
    }
}

fn crashed(key: &str) -> StorageError {
    StorageError::Io { key: key.to_owned(), source: std::io::Error::other("crashed") }
}

#[async_trait]
impl BlobStore for CrashingStore {
    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.change(key, self.inner.put(key, content)).await
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn BlobWriter>, StorageError> {
        self.check(key)?;
        let inner = self.inner.begin(key).await?;
        Ok(Box::new(CrashingWriter { store: self.clone(), key: key.to_owned(), inner }))
    }

    async fn read(&self, key: &str, offset: u64, limit: usize) -> Result<Bytes, StorageError> {
        self.check(key)?;
        self.inner.read(key, offset, limit).await
    }

    async fn delete(&self, key: &str) -> Result<(), StorageError> {
        self.change(key, self.inner.delete(key)).await
    }

    async fn list(&self, group: &str) -> Result<Vec<String>, StorageError> {
        self.check(group)?;
        self.inner.list(group).await
    }
}

#[async_trait]
impl BlobWriter for CrashingWriter {
    async fn write(&mut self, part: Bytes) -> Result<(), StorageError> {
        self.store.check(&self.key)?;
        self.inner.write(part).await
    }

    async fn commit(self: Box<Self>) -> Result<(), StorageError> {
        let Self { store, key, inner } = *self;
        store.change(&key, inner.commit()).await
    }
}
