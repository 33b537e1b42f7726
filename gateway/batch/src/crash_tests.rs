//! Batches on every kind of storage, with a crash before and after each write.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::{StreamExt as _, stream};
use moongate_testkit::S3Server;
use object_store::aws::AmazonS3Builder;
use object_store::memory::InMemory;
use tempfile::TempDir;

use crate::service_tests::{EchoBackend, OPTIONS, create, ids, lines_of, run_to_end, run_until};
use crate::storage::{BlobStore, BucketPrefix, BucketStore, FolderStore};
use crate::test_store::{CrashingStore, TestStore};
use crate::{BatchService, BatchStatus, PageQuery};

const PROMPTS: [&str; 7] = ["x", "400", "y", "z", "503 once", "w", "v"];
/// Scenarios that run at the same time.
const CONCURRENCY: usize = 16;

/// Storage that outlives a process.
#[async_trait]
trait DurablePlace: Send + Sync {
    /// The storage as a new process opens it, after the previous one has ended.
    async fn open(&self) -> Arc<dyn BlobStore>;
}

#[async_trait]
impl DurablePlace for TestStore {
    async fn open(&self) -> Arc<dyn BlobStore> {
        Arc::new(self.clone())
    }
}

#[async_trait]
impl DurablePlace for TempDir {
    async fn open(&self) -> Arc<dyn BlobStore> {
        // The previous process's writes may still run on other threads, which hold the lock.
        loop {
            match FolderStore::open(self.path()) {
                Ok(store) => return Arc::new(store),
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }
}

/// A bucket whose lease is not released, but expires.
#[async_trait]
impl DurablePlace for Arc<InMemory> {
    async fn open(&self) -> Arc<dyn BlobStore> {
        let store = BucketStore::new(self.clone(), &prefix("crash"));
        while !store.lease().try_acquire().await.unwrap() {
            tokio::time::sleep(crate::storage::RETRY_INTERVAL).await;
        }
        Arc::new(store)
    }
}

/// A prefix on a server. Its lease is released after a crash, because to wait until it expires takes real time.
struct ServedPrefix {
    store: BucketStore,
}

#[async_trait]
impl DurablePlace for ServedPrefix {
    async fn open(&self) -> Arc<dyn BlobStore> {
        self.store.lease().release().await;
        assert!(self.store.lease().try_acquire().await.unwrap());
        Arc::new(self.store.clone())
    }
}

fn prefix(prefix: &str) -> BucketPrefix {
    BucketPrefix { bucket: "test".to_owned(), prefix: prefix.to_owned() }
}

pub(crate) fn served(server: &S3Server, name: &str) -> BucketStore {
    let builder = AmazonS3Builder::new()
        .with_endpoint(server.url())
        .with_region("us-east-1")
        .with_access_key_id("test")
        .with_secret_access_key("test");
    BucketStore::build(builder, true, &prefix(name)).unwrap()
}

async fn open(store: Arc<dyn BlobStore>) -> BatchService {
    BatchService::open(store, OPTIONS).await.unwrap()
}

/// Runs a batch, crashes at one change, and runs it to its end.
async fn crash_at(place: &dyn DurablePlace, at: (usize, bool)) {
    let store = CrashingStore::new(place.open().await, Some(at));
    let service = open(Arc::new(store.clone())).await;
    let created = create(&service, &PROMPTS).await;
    if let Ok(batch) = &created {
        let is_final = || service.batch("a", &batch.id).unwrap().status.is_final();
        run_until(&service, &EchoBackend::default(), || store.has_crashed() || is_final()).await;
    }
    drop((service, store));
    let service = open(place.open().await).await;
    let batches = service.batches("a", &PageQuery { limit: 10, ..PageQuery::default() }).unwrap().items;
    assert!(created.is_err() || batches.len() == 1, "{at:?}: an acknowledged batch is lost");
    for batch in batches {
        let ended = run_to_end(&service, &EchoBackend::default(), &batch.id).await;
        assert_eq!(ended.status, BatchStatus::Completed, "{at:?}");
        let output = lines_of(&service, &ended.output_file).await;
        assert_eq!(ids(&output), ["line-0", "line-2", "line-3", "line-4", "line-5", "line-6"], "{at:?}");
        assert_eq!(ids(&lines_of(&service, &ended.error_file).await), ["line-1"], "{at:?}");
    }
    assert_eq!(service.stats().damaged, 0, "{at:?}");
}

/// A crash before and after each change, each at a place of its own.
async fn crash_at_every_change<P: DurablePlace>(place: impl Fn(usize) -> P) {
    crash_at_changes(place, 1).await;
}

/// A crash at every `step`th of the points before and after each change.
async fn crash_at_changes<P: DurablePlace>(place: impl Fn(usize) -> P, step: usize) {
    let whole = place(0);
    let store = CrashingStore::new(whole.open().await, None);
    let service = open(Arc::new(store.clone())).await;
    let batch = create(&service, &PROMPTS).await.unwrap();
    run_to_end(&service, &EchoBackend::default(), &batch.id).await;
    let changes = store.changes();
    assert!(changes > 10, "{changes}");
    let crashes = (0..changes).flat_map(|at| [(at, false), (at, true)]).step_by(step).enumerate();
    let scenarios = crashes.map(|(number, at)| {
        let place = place(number + 1);
        async move { crash_at(&place, at).await }
    });
    stream::iter(scenarios).buffer_unordered(CONCURRENCY).collect::<()>().await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_loses_and_repeats_no_line_in_memory() {
    crash_at_every_change(|_| TestStore::default()).await;
}

#[tokio::test]
async fn a_crash_loses_and_repeats_no_line_in_a_folder() {
    crash_at_every_change(|_| TempDir::new().unwrap()).await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_loses_and_repeats_no_line_with_a_lease() {
    crash_at_every_change(|_| Arc::new(InMemory::new())).await;
}

#[tokio::test]
async fn a_crash_loses_and_repeats_no_line_in_a_bucket() {
    let server = S3Server::start().unwrap();
    // Each takes requests over HTTP. Odd, so that both kinds of crashes occur.
    crash_at_changes(|number| ServedPrefix { store: served(&server, &format!("crash/{number}")) }, 3).await;
}
