//! Errors of requests for files and batches.

use crate::storage::StorageError;

/// Why a request for a file or batch fails.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// There is no such file of this tenant.
    #[error("no such file: {0}; GET /v1/files lists yours")]
    NoSuchFile(String),
    /// There is no such batch of this tenant.
    #[error("no such batch: {0}; GET /v1/batches lists yours")]
    NoSuchBatch(String),
    /// The request is invalid; `param` is the member at fault.
    #[error("{text}")]
    Invalid { param: &'static str, text: String },
    /// A limit on stored files or batches is reached.
    #[error("{0}")]
    Full(String),
    /// The stored state of this object is damaged.
    #[error(
        "the stored state of {id} is damaged: {reason}; restore it from a backup and restart the gateway"
    )]
    Damaged { id: String, reason: String },
    /// The storage cannot be read or written.
    #[error("batch storage: {0}")]
    Storage(#[from] StorageError),
    /// A record cannot be encoded.
    #[error("batch storage: {0}")]
    Encoding(#[from] serde_json::Error),
}

impl BatchError {
    pub(crate) fn invalid(param: &'static str, text: impl Into<String>) -> Self {
        Self::Invalid { param, text: text.into() }
    }
}
