//! Results of lines, stored in segments while a batch runs: each segment is one blob with the results of some lines.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::batch::RequestCounts;
use crate::file::new_id;
use crate::record::{RecordDamage, frame, unframe};
use crate::storage::{BlobStore, StorageError};

/// Group of the storage with the segments.
pub(crate) const RESULTS: &str = "results";
/// Largest segment that is read; a segment is written once its results exceed a part of this.
const MAX_SEGMENT_BYTES: usize = 256 << 20;
/// Segments that are read or deleted at the same time, and the most that are in memory for the output files.
const CONCURRENT_OPERATIONS: usize = 8;
const CACHED_SEGMENTS: usize = 4;

/// The outcome of one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LineResult {
    /// Position of the line among the lines of its batch.
    pub(crate) line: u32,
    pub(crate) is_success: bool,
    /// The line of the output file, without a line feed.
    pub(crate) text: String,
}

/// Why stored results cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResultsError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("{key} is damaged: {damage}")]
    Damaged { key: String, damage: RecordDamage },
    #[error("{key} has results of lines that the batch does not have")]
    Foreign { key: String },
}

#[derive(Serialize)]
struct OutputLine<'a> {
    id: &'a str,
    custom_id: &'a str,
    response: Option<OutputResponse<'a>>,
    error: Option<OutputError<'a>>,
}

#[derive(Serialize)]
struct OutputResponse<'a> {
    status_code: u16,
    request_id: &'a str,
    body: &'a RawValue,
}

#[derive(Serialize)]
struct OutputError<'a> {
    code: &'a str,
    message: &'a str,
}

/// The result of a line with a response. `body` is its JSON.
pub(crate) fn response_line(
    (line, custom_id): (u32, &str),
    request_id: &str,
    status: u16,
    body: &[u8],
) -> Result<LineResult, serde_json::Error> {
    let text = String::from_utf8_lossy(body);
    // Outside of texts, where JSON escapes them, line breaks are spaces.
    let one_line = text.trim().replace(['\n', '\r'], " ");
    let body: &RawValue = serde_json::from_str(&one_line)?;
    let response = OutputResponse { status_code: status, request_id, body };
    let output = OutputLine { id: &new_id("batch_req_"), custom_id, response: Some(response), error: None };
    let is_success = (200..300).contains(&status);
    Ok(LineResult { line, is_success, text: serde_json::to_string(&output)? })
}

/// The result of a line without a response.
pub(crate) fn error_line(
    (line, custom_id): (u32, &str),
    code: &str,
    message: &str,
) -> Result<LineResult, serde_json::Error> {
    let error = Some(OutputError { code, message });
    let output = OutputLine { id: &new_id("batch_req_"), custom_id, response: None, error };
    Ok(LineResult { line, is_success: false, text: serde_json::to_string(&output)? })
}

/// One line in the head of a segment: its number, whether it succeeded, and the length of its text.
#[derive(Serialize, Deserialize)]
struct SegmentEntry(u32, bool, usize);

/// Where the result of a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResultLocation {
    segment: u32,
    offset: u64,
    len: usize,
    pub(crate) is_success: bool,
}

/// The results of a batch that are stored.
#[derive(Debug)]
pub(crate) struct StoredResults {
    batch: String,
    by_line: Vec<Option<ResultLocation>>,
    next_segment: u32,
}

fn segment_key(batch: &str, number: u32) -> String {
    format!("{RESULTS}/{batch}.{number:08}")
}

/// Batch and number of a segment with this name; `None` for a name that is not one of ours.
pub(crate) fn segment_of_name(name: &str) -> Option<(&str, u32)> {
    let (batch, number) = name.rsplit_once('.')?;
    Some((batch, number.parse().ok()?))
}

impl StoredResults {
    /// Reads the heads of all segments of a batch with so many lines.
    pub(crate) async fn load(store: &dyn BlobStore, batch: &str, lines: usize) -> Result<Self, ResultsError> {
        let mut results = Self { batch: batch.to_owned(), by_line: vec![None; lines], next_segment: 0 };
        let mut numbers: Vec<u32> = segments(store, batch).await?;
        numbers.sort_unstable();
        let reads = numbers.into_iter().map(|number| async move {
            let key = segment_key(batch, number);
            let framed = store.read(&key, 0, MAX_SEGMENT_BYTES).await;
            (number, key, framed)
        });
        let mut reads = stream::iter(reads).buffered(CONCURRENT_OPERATIONS);
        while let Some((number, key, framed)) = reads.next().await {
            let framed = framed?;
            let damaged = |damage| ResultsError::Damaged { key: key.clone(), damage };
            let content = unframe(&framed).map_err(damaged)?;
            let head = content.split(|byte| *byte == b'\n').next().unwrap_or_default();
            let entries: Vec<SegmentEntry> =
                serde_json::from_slice(head).map_err(|error| damaged(error.into()))?;
            let start = framed.len() - content.len() + head.len() + 1;
            if !results.add(number, start, &entries) {
                return Err(ResultsError::Foreign { key });
            }
            results.next_segment = number + 1;
        }
        Ok(results)
    }

    /// Whether all lines are of the batch. The first result of a line counts.
    fn add(&mut self, segment: u32, start: usize, entries: &[SegmentEntry]) -> bool {
        let mut offset = start as u64;
        for &SegmentEntry(line, is_success, len) in entries {
            let Some(slot) = self.by_line.get_mut(line as usize) else { return false };
            slot.get_or_insert(ResultLocation { segment, offset, len, is_success });
            offset += len as u64 + 1;
        }
        true
    }

    /// Stores the results in a segment.
    pub(crate) async fn append(
        &mut self,
        store: &dyn BlobStore,
        results: &[LineResult],
    ) -> Result<(), StorageError> {
        let entries: Vec<SegmentEntry> = results
            .iter()
            .map(|result| SegmentEntry(result.line, result.is_success, result.text.len()))
            .collect();
        let key = segment_key(&self.batch, self.next_segment);
        let head = serde_json::to_string(&entries).map_err(|error| StorageError::io(&key, error.into()))?;
        let mut content = head;
        for result in results {
            content.push('\n');
            content.push_str(&result.text);
        }
        content.push('\n');
        let framed = frame(content.as_bytes());
        let texts: usize = results.iter().map(|result| result.text.len() + 1).sum();
        let start = framed.len() - texts;
        store.put(&key, framed).await?;
        self.add(self.next_segment, start, &entries);
        self.next_segment += 1;
        Ok(())
    }

    pub(crate) fn is_done(&self, line: usize) -> bool {
        self.by_line.get(line).is_some_and(Option::is_some)
    }

    pub(crate) fn counts(&self) -> RequestCounts {
        let done = |succeeded: bool| {
            self.by_line.iter().flatten().filter(|location| location.is_success == succeeded).count() as u32
        };
        RequestCounts { total: self.by_line.len() as u32, completed: done(true), failed: done(false) }
    }

    /// The result of a line; `None` if it has none.
    pub(crate) fn location(&self, line: usize) -> Option<ResultLocation> {
        self.by_line.get(line).copied().flatten()
    }

    /// Reads texts of results.
    pub(crate) fn reader<'a>(&'a self, store: &'a dyn BlobStore) -> ResultReader<'a> {
        ResultReader { store, batch: &self.batch, cached: VecDeque::new() }
    }
}

/// Reads results in the order of the input. Lines near each other ended at about the same time, so they are in few segments.
pub(crate) struct ResultReader<'a> {
    store: &'a dyn BlobStore,
    batch: &'a str,
    cached: VecDeque<(u32, Bytes)>,
}

impl ResultReader<'_> {
    /// The text of a result, with a line feed.
    pub(crate) async fn read(&mut self, at: ResultLocation) -> Result<Bytes, StorageError> {
        let key = segment_key(self.batch, at.segment);
        let segment = match self.cached.iter().find(|(segment, _)| *segment == at.segment) {
            Some((_, content)) => content.clone(),
            None => {
                let content = self.store.read(&key, 0, MAX_SEGMENT_BYTES).await?;
                self.cached.push_front((at.segment, content.clone()));
                self.cached.truncate(CACHED_SEGMENTS);
                content
            }
        };
        let start = usize::try_from(at.offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(at.len + 1);
        if end > segment.len() {
            return Err(StorageError::NotFound(format!("the end of {key}")));
        }
        Ok(segment.slice(start..end))
    }
}

/// Numbers of the segments of a batch.
async fn segments(store: &dyn BlobStore, batch: &str) -> Result<Vec<u32>, StorageError> {
    let names = store.list(RESULTS).await?;
    let own = names.iter().filter_map(|name| segment_of_name(name)).filter(|(of, _)| *of == batch);
    Ok(own.map(|(_, number)| number).collect())
}

/// Deletes the segments of a batch.
pub(crate) async fn delete_segments(store: &dyn BlobStore, batch: &str) -> Result<(), StorageError> {
    let numbers = segments(store, batch).await?;
    let deletions =
        numbers.into_iter().map(|number| async move { store.delete(&segment_key(batch, number)).await });
    stream::iter(deletions).buffer_unordered(CONCURRENT_OPERATIONS).try_collect().await
}

/// Lines that are not finished, in order.
pub(crate) fn unfinished(results: &StoredResults, lines: Range<usize>) -> impl Iterator<Item = usize> {
    lines.filter(|line| !results.is_done(*line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_store::TestStore;

    #[tokio::test]
    async fn results_are_found_again_and_the_first_counts() {
        let store = TestStore::default();
        let mut results = StoredResults::load(&store, "batch_1", 4).await.unwrap();
        let a = response_line((2, "c"), "r", 200, b"{\n \"x\": \"\\n\"\r\n}\n").unwrap();
        let b = error_line((0, "a\"é"), "batch_expired", "late").unwrap();
        results.append(&store, &[a.clone(), b.clone()]).await.unwrap();
        let again = response_line((2, "c"), "r", 500, b"{}").unwrap();
        results.append(&store, &[again]).await.unwrap();
        let loaded = StoredResults::load(&store, "batch_1", 4).await.unwrap();
        for results in [&results, &loaded] {
            assert_eq!(results.counts(), RequestCounts { total: 4, completed: 1, failed: 1 });
            assert_eq!(unfinished(results, 0..4).collect::<Vec<_>>(), [1, 3]);
            for (line, expected) in [(2, &a), (0, &b)] {
                let text = results.reader(&store).read(results.location(line).unwrap()).await.unwrap();
                assert_eq!(text, format!("{}\n", expected.text));
            }
        }
        assert!(StoredResults::load(&store, "batch_1", 2).await.is_err(), "a line beyond the input");
        store.damage("results/batch_1.00000001");
        assert!(matches!(StoredResults::load(&store, "batch_1", 4).await, Err(ResultsError::Damaged { .. })));
        delete_segments(&store, "batch_1").await.unwrap();
        assert_eq!(StoredResults::load(&store, "batch_1", 4).await.unwrap().counts().completed, 0);
    }
}
