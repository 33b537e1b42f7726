//! OpenAI's files and batches: an uploaded file of requests is run in the background, and its results are files again.
//!
//! `host` opens the storage, and has the service while this gateway owns it. `service` is the interface for HTTP handlers. `runner` sends the lines of a batch through an [`InferenceBackend`] while the
//! fleet is idle, and stores results in segments; `output` makes the output files of them. `batch` has the states, `catalog` the
//! records of files and batches in memory, `storage` what is durable. A module refers only to modules after it: `host`, `service`, `runner`,
//! `output`, `results`, `progress`, `input`, `catalog`, `batch`, `file`, `record`, `error`, `storage`.

mod batch;
mod catalog;
#[cfg(test)]
mod crash_tests;
mod error;
mod file;
mod host;
mod input;
mod line_reader;
mod output;
mod progress;
mod record;
mod results;
mod runner;
mod service;
#[cfg(test)]
mod service_tests;
mod storage;
#[cfg(test)]
mod test_store;

pub use batch::{BatchEndpoint, BatchRecord, BatchStatus, InputProblem, RequestCounts};
pub use catalog::{ObjectPage, PageQuery};
pub use error::BatchError;
pub use file::{FilePurpose, FileRecord};
pub use host::BatchHost;
pub use input::{InputScanner, LineError, ParsedLine, parse_line};
pub use progress::{BatchOptions, BatchStats, LineOutcome};
pub use runner::{BackendFailure, BackendResponse, InferenceBackend, LineRequest};
pub use service::{BatchService, NewBatch, NewFile};
pub use storage::{
    BlobStore, BlobWriter, BucketPrefix, BucketStore, FolderStore, InvalidLocation, StorageError,
    StoreLocation,
};
