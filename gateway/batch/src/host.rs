//! The service while this gateway owns its storage: a folder for as long as the process runs, a bucket while it holds the lease.

use std::sync::Arc;

use moongate_backoff::{Backoff, BackoffPolicy};
use parking_lot::RwLock;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::progress::{BatchOptions, BatchStats, RunProgress};
use crate::runner::InferenceBackend;
use crate::service::BatchService;
use crate::storage::{BlobStore, BucketStore, FolderStore, RETRY_INTERVAL, StorageError, StoreLocation};

/// Pauses while the storage cannot be opened.
const OPEN_BACKOFF: BackoffPolicy =
    BackoffPolicy { initial: RETRY_INTERVAL, max: std::time::Duration::from_secs(30) };

/// Files and batches of one storage, which another gateway may own.
#[derive(Debug)]
pub struct BatchHost {
    place: String,
    options: BatchOptions,
    /// `None` for a folder, which is owned from the start.
    bucket: Option<BucketStore>,
    current: RwLock<Option<Arc<BatchService>>>,
    progress: Arc<RunProgress>,
}

impl BatchHost {
    /// Opens the storage. If another gateway owns a bucket, or it does not respond, [`BatchHost::run`] waits for it.
    ///
    /// # Errors
    /// [`StorageError`] if the folder cannot be used, or the bucket not with these settings.
    pub async fn open(place: &StoreLocation, options: BatchOptions) -> Result<Self, StorageError> {
        match place {
            StoreLocation::Folder(root) => {
                let host = Self::new(place.to_string(), options, None);
                host.load(Arc::new(FolderStore::open(root)?)).await?;
                Ok(host)
            }
            StoreLocation::Bucket(prefix) => {
                Self::open_bucket(BucketStore::connect(prefix)?, place.to_string(), options).await
            }
        }
    }

    pub(crate) async fn open_bucket(
        bucket: BucketStore,
        place: String,
        options: BatchOptions,
    ) -> Result<Self, StorageError> {
        let host = Self::new(place, options, Some(bucket.clone()));
        match host.try_own(&bucket).await {
            Err(error) if error.is_misconfigured() => return Err(error),
            Err(error) => tracing::warn!(%error, "the storage of batches cannot be opened now; retrying"),
            Ok(true) => {}
            Ok(false) => {
                tracing::info!(place = %host.place, "another gateway runs the batches; waiting for its end");
            }
        }
        Ok(host)
    }

    fn new(place: String, options: BatchOptions, bucket: Option<BucketStore>) -> Self {
        Self { place, options, bucket, current: RwLock::default(), progress: Arc::default() }
    }

    /// Settings of the service.
    #[must_use]
    pub fn options(&self) -> &BatchOptions {
        &self.options
    }

    /// The service.
    ///
    /// # Errors
    /// [`StorageError::LeaseLost`] while another gateway has the lease, or the storage cannot be opened.
    pub fn service(&self) -> Result<Arc<BatchService>, StorageError> {
        self.current.read().clone().ok_or_else(|| StorageError::LeaseLost(self.place.clone()))
    }

    /// Figures for metrics; those of stored objects are 0 while another gateway owns them.
    #[must_use]
    pub fn stats(&self) -> BatchStats {
        match &*self.current.read() {
            Some(service) => service.stats(),
            None => BatchStats { lines: self.progress.outcomes(), ..BatchStats::default() },
        }
    }

    /// Runs batches until `stop`, whenever this gateway owns the storage.
    pub async fn run<B: InferenceBackend>(&self, backend: &B, stop: CancellationToken) {
        let Some(bucket) = &self.bucket else {
            if let Ok(service) = self.service() {
                service.run(backend, stop).await;
            }
            return;
        };
        while self.own(bucket, &stop).await {
            self.run_owned(bucket, backend, &stop).await;
            if stop.is_cancelled() {
                return;
            }
        }
    }

    /// Waits for the lease. Returns `false` if stopped.
    async fn own(&self, bucket: &BucketStore, stop: &CancellationToken) -> bool {
        let mut backoff = Backoff::new(OPEN_BACKOFF);
        while self.current.read().is_none() {
            let pause = match stop.run_until_cancelled(self.try_own(bucket)).await {
                None => return false,
                Some(Ok(true)) => break,
                Some(Ok(false)) => {
                    backoff.reset();
                    RETRY_INTERVAL
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, "the storage of batches cannot be opened now; retrying");
                    backoff.record_failure();
                    backoff.jittered_pause()
                }
            };
            if stop.run_until_cancelled(sleep(pause)).await.is_none() {
                return false;
            }
        }
        true
    }

    /// Runs batches until `stop`, or until the lease is lost.
    async fn run_owned<B: InferenceBackend>(
        &self,
        bucket: &BucketStore,
        backend: &B,
        stop: &CancellationToken,
    ) {
        let Ok(service) = self.service() else { return };
        let (stop_running, ended) = (stop.child_token(), CancellationToken::new());
        let run = async {
            service.run(backend, stop_running.clone()).await;
            ended.cancel();
        };
        let renew = async {
            bucket.lease().renew(&ended).await;
            stop_running.cancel();
        };
        tokio::join!(run, renew);
        *self.current.write() = None;
        bucket.lease().release().await;
    }

    /// Takes the lease if no one has it, and reads what is stored.
    async fn try_own(&self, bucket: &BucketStore) -> Result<bool, StorageError> {
        if !bucket.lease().try_acquire().await? {
            return Ok(false);
        }
        let ended = CancellationToken::new();
        let load = async {
            let result = self.load(Arc::new(bucket.clone())).await;
            ended.cancel();
            result
        };
        // A large storage takes longer to read than the lease lasts.
        let (result, ()) = tokio::join!(load, bucket.lease().renew(&ended));
        if result.is_err() {
            bucket.lease().release().await;
        }
        result.map(|()| true)
    }

    async fn load(&self, store: Arc<dyn BlobStore>) -> Result<(), StorageError> {
        let service = BatchService::open_with(store, self.options, self.progress.clone()).await?;
        *self.current.write() = Some(Arc::new(service));
        Ok(())
    }
}
