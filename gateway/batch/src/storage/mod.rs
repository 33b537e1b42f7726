//! What is durable: named blobs, each replaced as a whole. A folder, or any store with atomic puts and ranged reads.

mod bucket;
mod folder;
mod lease;
mod location;

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

pub use bucket::BucketStore;
pub use folder::FolderStore;
pub(crate) use lease::RETRY_INTERVAL;
pub use location::{BucketPrefix, InvalidLocation, StoreLocation};

/// Why the storage cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// There is no blob with this key.
    #[error("{0} does not exist")]
    NotFound(String),
    #[error("{key}: {source}")]
    Io { key: String, source: std::io::Error },
    /// Another process uses the storage.
    #[error("{0} is used by another gateway; give each gateway a folder of its own")]
    Locked(String),
    /// An S3-compatible store rejects a request, or does not respond.
    #[error("{key}: {source}")]
    Object { key: String, source: Box<object_store::Error> },
    /// A change may or may not have taken effect.
    #[error("{key}: the store did not respond within {limit:?}")]
    Timeout { key: String, limit: Duration },
    /// Nothing may be changed without the lease.
    #[error("this gateway does not own {0} now: another one does, or the lease could not be renewed in time")]
    LeaseLost(String),
    /// The store would let two gateways run the same batches.
    #[error(
        "{0} ignores conditions of writes (If-None-Match); use a server that supports them, such as AWS S3 or a recent MinIO or Ceph"
    )]
    Unconditional(String),
}

impl StorageError {
    pub(crate) fn io(key: &str, source: std::io::Error) -> Self {
        match source.kind() {
            std::io::ErrorKind::NotFound => Self::NotFound(key.to_owned()),
            _ => Self::Io { key: key.to_owned(), source },
        }
    }

    pub(crate) fn object(key: &str, source: object_store::Error) -> Self {
        match source {
            object_store::Error::NotFound { .. } => Self::NotFound(key.to_owned()),
            source => Self::Object { key: key.to_owned(), source: Box::new(source) },
        }
    }

    /// Whether the same operation may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        !matches!(self, Self::NotFound(_))
    }

    /// Whether an operator has to change something before the storage can be opened.
    pub(crate) fn is_misconfigured(&self) -> bool {
        use object_store::Error as Source;
        match self {
            Self::NotFound(_) | Self::Locked(_) | Self::Unconditional(_) => true,
            Self::Object { source, .. } => matches!(
                **source,
                Source::PermissionDenied { .. }
                    | Source::Unauthenticated { .. }
                    | Source::NotImplemented { .. }
            ),
            _ => false,
        }
    }
}

/// Blobs by key. Keys are `GROUP/NAME` of ASCII letters, digits, `_`, `-` and `.`.
///
/// A put is atomic and durable: once it has returned, the content survives a crash, and before that, a reader gets the previous
/// content or none.
#[async_trait]
pub trait BlobStore: std::fmt::Debug + Send + Sync {
    /// Creates or replaces a blob.
    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError>;

    /// Begins a blob that is written in parts. It does not exist until its writer commits.
    async fn begin(&self, key: &str) -> Result<Box<dyn BlobWriter>, StorageError>;

    /// Up to `limit` bytes from `offset`; fewer only at the end of the blob.
    async fn read(&self, key: &str, offset: u64, limit: usize) -> Result<Bytes, StorageError>;

    /// Deletes a blob; without effect if it does not exist.
    async fn delete(&self, key: &str) -> Result<(), StorageError>;

    /// Names of all blobs in a group, in no order.
    async fn list(&self, group: &str) -> Result<Vec<String>, StorageError>;
}

/// An unfinished blob; abandoned on drop.
#[async_trait]
pub trait BlobWriter: Send {
    async fn write(&mut self, part: Bytes) -> Result<(), StorageError>;

    /// Makes the blob durable and visible, as a put.
    async fn commit(self: Box<Self>) -> Result<(), StorageError>;
}
