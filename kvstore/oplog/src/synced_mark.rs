//! The file `synced`: the record up to which the log was flushed to the disk.
//!
//! It is written after each flush. A log that ends before that record has lost records, even if its tail is intact. Records written after
//! the last flush are not covered: a log truncated between two of those records cannot be distinguished from an intact one.

use crate::directory::LogDirectory;
use crate::{OplogError, io_error};

pub(crate) const NAME: &str = "synced";
const MAGIC: [u8; 8] = *b"mgsynced";
const LENGTH: usize = 20;

/// Content of the file `synced`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SyncedMark {
    /// The file does not exist: nothing was flushed yet, or an older release wrote the log.
    Absent,
    /// The log was flushed up to this record.
    Through(u64),
    Damaged,
}

impl SyncedMark {
    pub(crate) fn read(folder: &LogDirectory) -> Result<Self, OplogError> {
        let bytes = folder.get(NAME).map_err(io_error(folder.path().join(NAME)))?;
        Ok(bytes.map_or(Self::Absent, |bytes| parse(&bytes).map_or(Self::Damaged, Self::Through)))
    }

    pub(crate) fn write(folder: &LogDirectory, number: u64) -> std::io::Result<()> {
        let mut bytes = [0; LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        let sum = crc32fast::hash(&bytes[..16]);
        bytes[16..].copy_from_slice(&sum.to_le_bytes());
        folder.replace(NAME, &bytes)
    }

    pub(crate) fn remove(folder: &LogDirectory) -> Result<(), OplogError> {
        let path = folder.path().join(NAME);
        match folder.disk().remove(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(io_error(path)(error)),
            _ => Ok(()),
        }
    }

    pub(crate) fn number(self) -> u64 {
        match self {
            Self::Through(number) => number,
            Self::Absent | Self::Damaged => 0,
        }
    }
}

fn parse(bytes: &[u8]) -> Option<u64> {
    let bytes: &[u8; LENGTH] = bytes.try_into().ok()?;
    let sum = u32::from_le_bytes(*bytes[16..].first_chunk()?);
    let is_valid = bytes[..8] == MAGIC && crc32fast::hash(&bytes[..16]) == sum;
    is_valid.then(|| bytes[8..].first_chunk().map(|number| u64::from_le_bytes(*number)))?
}
