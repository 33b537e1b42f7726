//! The name and the header of a log file.

/// Prefix of the names of log files; the number of the first record follows.
pub(crate) const PREFIX: &str = "log";
pub(crate) const SUFFIX: &str = "log";

/// Size of the header in bytes.
pub(crate) const HEADER_SIZE: usize = 64;
const MAGIC: [u8; 8] = *b"mgoplog1";
const BOOT_ID: usize = 36;

/// The header of a log file: 8 bytes of magic, u64 number of the first record, 36 bytes of the machine's boot id at creation, one byte
/// that is 1 if every commit was flushed, 7 zero bytes, u32 CRC-32 of all preceding bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogFileHeader {
    pub(crate) first: u64,
    pub(crate) boot_id: String,
    pub(crate) flushed: bool,
}

impl LogFileHeader {
    /// Whether the file was created under this boot id, which must be known.
    pub(crate) fn is_from_boot(&self, boot_id: &str) -> bool {
        !boot_id.is_empty() && self.boot_id == boot_id
    }

    pub(crate) fn write(&self) -> [u8; HEADER_SIZE] {
        let mut header = [0; HEADER_SIZE];
        header[..8].copy_from_slice(&MAGIC);
        header[8..16].copy_from_slice(&self.first.to_le_bytes());
        let id = self.boot_id.as_bytes();
        let length = id.len().min(BOOT_ID);
        header[16..16 + length].copy_from_slice(&id[..length]);
        header[52] = u8::from(self.flushed);
        let sum = crc32fast::hash(&header[..60]);
        header[60..].copy_from_slice(&sum.to_le_bytes());
        header
    }

    /// Parses the header of a file; `None` if it is invalid.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let header: &[u8; HEADER_SIZE] = bytes.first_chunk()?;
        let sum = u32::from_le_bytes(*header[60..].first_chunk()?);
        let first = u64::from_le_bytes(*header[8..].first_chunk()?);
        if header[..8] != MAGIC || crc32fast::hash(&header[..60]) != sum || first == 0 {
            return None;
        }
        let id = header[16..16 + BOOT_ID].split(|byte| *byte == 0).next()?;
        Some(Self { first, boot_id: String::from_utf8_lossy(id).into_owned(), flushed: header[52] == 1 })
    }
}
