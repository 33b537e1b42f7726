//! Files: uploaded inputs, and outputs of batches.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Group of the storage with the files' records and contents.
pub(crate) const FILES: &str = "files";
const RECORD_SUFFIX: &str = ".record";
const CONTENT_SUFFIX: &str = ".content";
pub(crate) const FILE_ID_PREFIX: &str = "file-";

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilePurpose {
    /// Input of batches.
    Batch,
    /// Results of a batch.
    BatchOutput,
}

impl FilePurpose {
    /// Name in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::BatchOutput => "batch_output",
        }
    }
}

/// A stored file without its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub id: String,
    /// Owner of the file; only it sees the file.
    pub tenant: String,
    pub filename: String,
    pub purpose: FilePurpose,
    /// Length of the content.
    pub bytes: u64,
    /// CRC-32 of the content.
    pub crc32: u32,
    /// Unix time in seconds.
    pub created_at: u64,
}

impl FileRecord {
    /// The `file` object of OpenAI's API.
    #[must_use]
    pub fn object(&self) -> Value {
        json!({
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": null,
            "filename": self.filename,
            "purpose": self.purpose.as_str(),
            "status": "processed",
            "status_details": null,
        })
    }

    pub(crate) fn content_key(&self) -> String {
        content_key(&self.id)
    }
}

pub(crate) fn record_key(id: &str) -> String {
    format!("{FILES}/{id}{RECORD_SUFFIX}")
}

pub(crate) fn content_key(id: &str) -> String {
    format!("{FILES}/{id}{CONTENT_SUFFIX}")
}

/// What a blob of the group is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileBlob {
    Record { id: String },
    Content { id: String },
}

impl FileBlob {
    /// `None` for a name that is not one of ours.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        if !name.starts_with(FILE_ID_PREFIX) {
            return None;
        }
        if let Some(id) = name.strip_suffix(RECORD_SUFFIX) {
            return Some(Self::Record { id: id.to_owned() });
        }
        name.strip_suffix(CONTENT_SUFFIX).map(|id| Self::Content { id: id.to_owned() })
    }
}

/// An id that sorts by its time of creation, with 80 random bits.
pub(crate) fn new_id(prefix: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let time = now as u64 & 0xffff_ffff_ffff;
    format!("{prefix}{time:012x}{:020x}", fastrand::u128(..) >> 48)
}

/// Seconds since 1970.
pub(crate) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
