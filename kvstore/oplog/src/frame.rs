//! Frame of a record in a file: length, checksum, number, then the record.

use crate::MAX_RECORD;

/// Size of the frame header: u32 length, u32 CRC-32 of all other fields and the record, u64 number; little-endian.
pub(crate) const HEADER_SIZE: usize = 16;

/// Result of reading a frame at an offset.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FrameReadResult<'a> {
    /// A valid record with its number.
    Record(u64, &'a [u8]),
    /// The end of the file.
    End,
    /// An incomplete or corrupt record.
    Torn,
}

fn checksum(length: [u8; 4], number: [u8; 8], record: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&length);
    hasher.update(&number);
    hasher.update(record);
    hasher.finalize()
}

/// Appends the frame of a record.
pub(crate) fn write(number: u64, record: &[u8], out: &mut Vec<u8>) {
    debug_assert!(record.len() <= MAX_RECORD);
    let (length, number) = ((record.len() as u32).to_le_bytes(), number.to_le_bytes());
    out.extend_from_slice(&length);
    out.extend_from_slice(&checksum(length, number, record).to_le_bytes());
    out.extend_from_slice(&number);
    out.extend_from_slice(record);
}

/// The frame header of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub(crate) length: usize,
    crc: u32,
    pub(crate) number: u64,
}

/// Parses a frame header without verifying it.
pub(crate) fn header(bytes: &[u8]) -> Option<RecordHeader> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let number = u64::from_le_bytes(*rest.first_chunk::<8>()?);
    Some(RecordHeader { length: u32::from_le_bytes(*length) as usize, crc: u32::from_le_bytes(*sum), number })
}

/// Whether the record's checksum is valid for this length, regardless of the length in its header.
pub(crate) fn fits(bytes: &[u8], length: usize) -> bool {
    let record = bytes.get(HEADER_SIZE..).and_then(|rest| rest.get(..length));
    let (Some(header), Some(record), Ok(size)) = (header(bytes), record, u32::try_from(length)) else {
        return false;
    };
    length <= MAX_RECORD && checksum(size.to_le_bytes(), header.number.to_le_bytes(), record) == header.crc
}

/// Reads the record at the start of `bytes`.
pub(crate) fn read(bytes: &[u8]) -> FrameReadResult<'_> {
    if bytes.is_empty() {
        return FrameReadResult::End;
    }
    let Some(RecordHeader { length, number, .. }) = header(bytes) else { return FrameReadResult::Torn };
    match bytes.get(HEADER_SIZE..).and_then(|rest| rest.get(..length)) {
        Some(record) if fits(bytes, length) => FrameReadResult::Record(number, record),
        _ => FrameReadResult::Torn,
    }
}
