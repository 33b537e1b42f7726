//! The head of a log file.

/// Bytes of the head.
pub(crate) const HEADER_SIZE: usize = 64;
const MAGIC: [u8; 8] = *b"mgoplog1";
const BOOT_ID: usize = 36;

/// What stands at the beginning of a log file: 8 bytes of magic, u64 number of its first record, 36 bytes that name the machine's
/// start under which it was begun, one byte that is 1 if every commit was flushed, 7 bytes of nothing, u32 CRC-32 of all before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogFileHeader {
    pub(crate) first: u64,
    pub(crate) boot_id: String,
    pub(crate) flushed: bool,
}

impl LogFileHeader {
    pub(crate) fn write(&self) -> [u8; HEADER_SIZE] {
        let mut head = [0; HEADER_SIZE];
        head[..8].copy_from_slice(&MAGIC);
        head[8..16].copy_from_slice(&self.first.to_le_bytes());
        let id = self.boot_id.as_bytes();
        let length = id.len().min(BOOT_ID);
        head[16..16 + length].copy_from_slice(&id[..length]);
        head[52] = u8::from(self.flushed);
        let sum = crc32fast::hash(&head[..60]);
        head[60..].copy_from_slice(&sum.to_le_bytes());
        head
    }

    /// Reads the head of a file, if it has one.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let head: &[u8; HEADER_SIZE] = bytes.first_chunk()?;
        let sum = u32::from_le_bytes(*head[60..].first_chunk()?);
        let first = u64::from_le_bytes(*head[8..].first_chunk()?);
        if head[..8] != MAGIC || crc32fast::hash(&head[..60]) != sum || first == 0 {
            return None;
        }
        let id = head[16..16 + BOOT_ID].split(|byte| *byte == 0).next()?;
        Some(Self { first, boot_id: String::from_utf8_lossy(id).into_owned(), flushed: head[52] == 1 })
    }
}
