//! One record in a file: length, checksum, number, then the record.

use crate::MAX_RECORD;

/// Bytes before a record: u32 length, u32 CRC-32 of all but itself, u64 number; little-endian.
pub(crate) const HEADER: usize = 16;

/// What begins somewhere in a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found<'a> {
    /// A record with its number.
    Record(u64, &'a [u8]),
    /// Nothing more.
    End,
    /// No whole record.
    Torn,
}

fn checksum(length: [u8; 4], number: [u8; 8], record: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&length);
    hasher.update(&number);
    hasher.update(record);
    hasher.finalize()
}

/// Appends a record.
pub(crate) fn write(number: u64, record: &[u8], out: &mut Vec<u8>) {
    debug_assert!(record.len() <= MAX_RECORD);
    let (length, number) = ((record.len() as u32).to_le_bytes(), number.to_le_bytes());
    out.extend_from_slice(&length);
    out.extend_from_slice(&checksum(length, number, record).to_le_bytes());
    out.extend_from_slice(&number);
    out.extend_from_slice(record);
}

/// Reads the record with which `bytes` begin.
pub(crate) fn read(bytes: &[u8]) -> Found<'_> {
    if bytes.is_empty() {
        return Found::End;
    }
    let parts = bytes
        .split_first_chunk::<4>()
        .and_then(|(length, rest)| rest.split_first_chunk::<4>().map(|(sum, rest)| (*length, *sum, rest)))
        .and_then(|(length, sum, rest)| {
            rest.split_first_chunk::<8>().map(|(number, rest)| (length, sum, *number, rest))
        });
    let Some((length, sum, number, rest)) = parts else { return Found::Torn };
    let size = u32::from_le_bytes(length) as usize;
    match rest.get(..size) {
        Some(record) if size <= MAX_RECORD && checksum(length, number, record) == u32::from_le_bytes(sum) => {
            Found::Record(u64::from_le_bytes(number), record)
        }
        _ => Found::Torn,
    }
}
