//! Interface of the HTTP handlers: files and batches of a tenant.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::batch::{BATCH_ID_PREFIX, BatchEndpoint, BatchEvent, BatchRecord, BatchStatus, RequestCounts};
use crate::catalog::{Catalog, ObjectPage, PageQuery, TransitionError};
use crate::error::BatchError;
use crate::file::{FILE_ID_PREFIX, FilePurpose, FileRecord, new_id, unix_now};
use crate::progress::{BatchOptions, BatchStats, RunProgress};
use crate::runner::{BatchRunner, InferenceBackend};
use crate::storage::{BlobStore, StorageError};

/// Longest file name in bytes.
const MAX_FILENAME_LEN: usize = 512;
/// Limits of a batch's metadata, as in OpenAI's API.
const MAX_METADATA: usize = 16;
const MAX_METADATA_KEY_LEN: usize = 64;
const MAX_METADATA_VALUE_LEN: usize = 512;

/// An upload.
#[derive(Debug, Clone)]
pub struct NewFile {
    pub filename: String,
    pub content: Bytes,
}

/// A batch to be created.
#[derive(Debug, Clone)]
pub struct NewBatch {
    pub input_file: String,
    pub endpoint: BatchEndpoint,
    pub metadata: BTreeMap<String, String>,
}

/// Files and batches of all tenants.
#[derive(Debug)]
pub struct BatchService {
    catalog: Catalog,
    options: BatchOptions,
    progress: Arc<RunProgress>,
    created: Notify,
}

impl BatchService {
    /// Reads what is stored.
    ///
    /// # Errors
    /// [`StorageError`] if the storage cannot be read. Damaged records are reported and left as they are.
    pub async fn open(store: Arc<dyn BlobStore>, options: BatchOptions) -> Result<Self, StorageError> {
        Self::open_with(store, options, Arc::default()).await
    }

    /// As [`BatchService::open`]; the lines are counted in `progress`.
    pub(crate) async fn open_with(
        store: Arc<dyn BlobStore>,
        options: BatchOptions,
        progress: Arc<RunProgress>,
    ) -> Result<Self, StorageError> {
        let catalog = Catalog::load(store).await?;
        Ok(Self { catalog, options, progress, created: Notify::new() })
    }

    /// Runs batches until `stop`; lines that have not ended then are run again after the next start.
    pub async fn run<B: InferenceBackend>(&self, backend: &B, stop: CancellationToken) {
        BatchRunner::new(&self.catalog, &self.progress, &self.options, backend, stop)
            .run(&self.created)
            .await;
    }

    /// Settings of the service.
    #[must_use]
    pub fn options(&self) -> &BatchOptions {
        &self.options
    }

    /// Stores an input file.
    ///
    /// # Errors
    /// [`BatchError`] if the file is too large, or cannot be stored.
    pub async fn create_file(&self, tenant: &str, file: NewFile) -> Result<FileRecord, BatchError> {
        let bytes = file.content.len() as u64;
        if bytes > self.options.max_file_bytes {
            let limit = self.options.max_file_bytes;
            let text =
                format!("the file has {bytes} bytes, more than {limit} (--batch-max-file-bytes); split it");
            return Err(BatchError::invalid("file", text));
        }
        if bytes == 0 {
            return Err(BatchError::invalid("file", "the file is empty; write one request per line"));
        }
        if file.filename.len() > MAX_FILENAME_LEN {
            let text = format!("the file's name is longer than {MAX_FILENAME_LEN} bytes; shorten it");
            return Err(BatchError::invalid("file", text));
        }
        let record = FileRecord {
            id: new_id(FILE_ID_PREFIX),
            tenant: tenant.to_owned(),
            filename: file.filename,
            purpose: FilePurpose::Batch,
            bytes,
            crc32: crc32fast::hash(&file.content),
            created_at: unix_now(),
        };
        self.catalog.create_file(record, file.content, self.options.max_stored_bytes).await
    }

    /// Files of the tenant, of this purpose if it is given.
    ///
    /// # Errors
    /// [`BatchError::Invalid`] if the query is.
    pub fn files(
        &self,
        tenant: &str,
        purpose: Option<&str>,
        query: &PageQuery,
    ) -> Result<ObjectPage<FileRecord>, BatchError> {
        self.catalog.files(tenant, purpose, query)
    }

    /// One file of the tenant.
    ///
    /// # Errors
    /// [`BatchError`] if there is none, or it is damaged.
    pub fn file(&self, tenant: &str, id: &str) -> Result<FileRecord, BatchError> {
        self.catalog.file(tenant, id)
    }

    /// Up to `limit` bytes of a file's content.
    ///
    /// # Errors
    /// [`StorageError`] if it cannot be read, or has been deleted.
    pub async fn read_file(
        &self,
        file: &FileRecord,
        offset: u64,
        limit: usize,
    ) -> Result<Bytes, StorageError> {
        self.catalog.store().read(&file.content_key(), offset, limit).await
    }

    /// Deletes a file of the tenant.
    ///
    /// # Errors
    /// [`BatchError`] if there is none, or a batch needs it.
    pub async fn delete_file(&self, tenant: &str, id: &str) -> Result<(), BatchError> {
        self.catalog.delete_file(tenant, id).await
    }

    /// Creates a batch, which then runs.
    ///
    /// # Errors
    /// [`BatchError`] if the request is invalid, or the batch cannot be stored.
    pub async fn create_batch(&self, tenant: &str, batch: NewBatch) -> Result<BatchRecord, BatchError> {
        check_metadata(&batch.metadata)?;
        let file = self.catalog.file(tenant, &batch.input_file)?;
        if file.purpose != FilePurpose::Batch {
            let text = format!("{} has the purpose {}, not batch", file.id, file.purpose.as_str());
            return Err(BatchError::invalid("input_file_id", text));
        }
        let now = unix_now();
        let record = BatchRecord {
            id: new_id(BATCH_ID_PREFIX),
            tenant: tenant.to_owned(),
            endpoint: batch.endpoint,
            input_file: batch.input_file,
            status: BatchStatus::Validating,
            metadata: batch.metadata,
            created_at: now,
            expires_at: now + self.options.window.as_secs(),
            entered_at: BTreeMap::new(),
            counts: RequestCounts::default(),
            errors: Vec::new(),
            reserved_output: new_id(FILE_ID_PREFIX),
            reserved_errors: new_id(FILE_ID_PREFIX),
            output_file: None,
            error_file: None,
        };
        let record = self.catalog.create_batch(record).await?;
        self.created.notify_one();
        Ok(record)
    }

    /// Batches of the tenant.
    ///
    /// # Errors
    /// [`BatchError::Invalid`] if the query is.
    pub fn batches(&self, tenant: &str, query: &PageQuery) -> Result<ObjectPage<BatchRecord>, BatchError> {
        let mut page = self.catalog.batches(tenant, query)?;
        page.items.iter_mut().for_each(|batch| self.update_counts(batch));
        Ok(page)
    }

    /// One batch of the tenant.
    ///
    /// # Errors
    /// [`BatchError`] if there is none, or it is damaged.
    pub fn batch(&self, tenant: &str, id: &str) -> Result<BatchRecord, BatchError> {
        let mut batch = self.catalog.batch(tenant, id)?;
        self.update_counts(&mut batch);
        Ok(batch)
    }

    /// Cancels a batch: its running lines are aborted, and the results so far are written to its output files.
    ///
    /// # Errors
    /// [`BatchError`] if there is none, or it has ended.
    pub async fn cancel_batch(&self, tenant: &str, id: &str) -> Result<BatchRecord, BatchError> {
        self.catalog.batch(tenant, id)?;
        match self.catalog.transition(id, BatchEvent::CancelRequested, unix_now()).await {
            Ok(mut batch) => {
                self.update_counts(&mut batch);
                self.progress.interrupt(id);
                Ok(batch)
            }
            Err(TransitionError::Invalid(error)) => Err(BatchError::invalid(
                "batch_id",
                format!("a batch that is {} cannot be cancelled", error.0),
            )),
            Err(TransitionError::Batch(error)) => Err(error),
        }
    }

    /// Figures for metrics.
    #[must_use]
    pub fn stats(&self) -> BatchStats {
        BatchStats {
            batches: self.catalog.batches_by_status(),
            lines: self.progress.outcomes(),
            stored_bytes: self.catalog.stored_bytes(),
            damaged: self.catalog.damaged(),
        }
    }

    fn update_counts(&self, batch: &mut BatchRecord) {
        if let Some(counts) = self.progress.counts(&batch.id) {
            batch.counts = counts;
        }
    }
}

fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), BatchError> {
    let fits = |(key, value): (&String, &String)| {
        key.len() <= MAX_METADATA_KEY_LEN && value.len() <= MAX_METADATA_VALUE_LEN
    };
    if metadata.len() <= MAX_METADATA && metadata.iter().all(fits) {
        return Ok(());
    }
    let text = format!(
        "`metadata` may have {MAX_METADATA} members, with names of up to {MAX_METADATA_KEY_LEN} and values of up to \
         {MAX_METADATA_VALUE_LEN} bytes"
    );
    Err(BatchError::invalid("metadata", text))
}
