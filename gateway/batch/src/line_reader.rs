//! Reads lines of an input. In a bucket each read is a request, so small lines are read many at a time.

use bytes::Bytes;
use tokio::sync::Mutex;

use crate::file::content_key;
use crate::input::LineSpan;
use crate::storage::{BlobStore, StorageError};

/// Lines are read in ranges of this size; longer ones on their own.
const RANGE_BYTES: usize = 256 << 10;

/// Reads the lines of one batch, of which most are read in their order.
pub(crate) struct LineReader<'a> {
    store: &'a dyn BlobStore,
    key: String,
    /// Held during a read, so that lines that start together share it.
    last: Mutex<ReadRange>,
}

#[derive(Default)]
struct ReadRange {
    offset: u64,
    content: Bytes,
}

impl ReadRange {
    fn line(&self, span: LineSpan) -> Option<Bytes> {
        let start = usize::try_from(span.offset.checked_sub(self.offset)?).ok()?;
        let end = start.checked_add(span.len as usize)?;
        (end <= self.content.len()).then(|| self.content.slice(start..end))
    }
}

impl<'a> LineReader<'a> {
    /// Reads lines of this file.
    pub(crate) fn new(store: &'a dyn BlobStore, file: &str) -> Self {
        Self { store, key: content_key(file), last: Mutex::default() }
    }

    /// Bytes of one line.
    pub(crate) async fn read(&self, span: LineSpan) -> Result<Bytes, StorageError> {
        let len = span.len as usize;
        if len > RANGE_BYTES {
            return self.store.read(&self.key, span.offset, len).await;
        }
        let mut last = self.last.lock().await;
        if let Some(line) = last.line(span) {
            return Ok(line);
        }
        let content = self.store.read(&self.key, span.offset, RANGE_BYTES).await?;
        let range = ReadRange { offset: span.offset, content };
        // The input was scanned, so a shorter one has been damaged since.
        let line = range.line(span).unwrap_or_else(|| range.content.clone());
        *last = range;
        Ok(line)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;

    use super::*;
    use crate::test_store::TestStore;

    #[tokio::test]
    async fn small_lines_are_read_together() {
        let store = TestStore::default();
        let (small, large) = (1_000, RANGE_BYTES as u32 + 1);
        let mut spans = Vec::new();
        let mut content = Vec::new();
        for number in 0..1_000_u32 {
            let len = if number == 500 { large } else { small };
            spans.push(LineSpan { offset: content.len() as u64, len });
            content.resize(content.len() + len as usize, number as u8);
            content.push(b'\n');
        }
        store.put(&content_key("file-1"), content.into()).await.unwrap();
        let reader = LineReader::new(&store, "file-1");
        // Lines start at about the same time, and some are repeated later.
        for (first, batch) in spans.chunks(50).enumerate() {
            let lines = join_all(batch.iter().map(|span| reader.read(*span))).await;
            for (position, (line, span)) in lines.into_iter().zip(batch).enumerate() {
                let expected = vec![(first * 50 + position) as u8; span.len as usize];
                assert!(line.unwrap() == expected, "line {}", first * 50 + position);
            }
        }
        assert!(store.reads() < 10, "{}", store.reads());
        assert_eq!(reader.read(spans[3]).await.unwrap(), vec![3; 1_000]);
        let beyond = LineSpan { offset: spans[999].offset + 500, len: 1_000 };
        assert_eq!(reader.read(beyond).await.unwrap().len(), 501, "a file that has become shorter");
        let missing = LineReader::new(&store, "file-2").read(spans[0]).await;
        assert!(matches!(missing, Err(StorageError::NotFound(_))));
    }
}
