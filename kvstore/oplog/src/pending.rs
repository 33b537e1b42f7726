//! Records that are appended in memory, until they are written.

use crate::frame;

/// Appended records whose write has not started.
pub(crate) struct PendingRecords {
    bytes: Vec<u8>,
    next: u64,
}

impl PendingRecords {
    /// No records yet; the first one gets the number `next`.
    pub(crate) fn starting_at(next: u64) -> Self {
        Self { bytes: Vec::new(), next }
    }

    /// Number of the next record.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Appends a record and returns its number.
    pub(crate) fn append(&mut self, record: &[u8]) -> u64 {
        let number = self.next;
        frame::write(number, record, &mut self.bytes);
        self.next += 1;
        number
    }

    /// Moves the records to the end of `bytes`. Returns the number of the last one.
    pub(crate) fn move_to(&mut self, bytes: &mut Vec<u8>) -> u64 {
        if bytes.is_empty() {
            std::mem::swap(bytes, &mut self.bytes);
        } else {
            bytes.append(&mut self.bytes);
        }
        self.next - 1
    }
}
