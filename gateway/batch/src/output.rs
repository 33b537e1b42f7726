//! Output files of a batch, made of its results in the order of the input.

use bytes::BytesMut;

use crate::batch::{BatchRecord, BatchStatus, FinishedOutput, InputProblem, RequestCounts};
use crate::catalog::Catalog;
use crate::error::BatchError;
use crate::file::{FilePurpose, FileRecord, unix_now};
use crate::input::{InputScanner, LineSpan, parse_line};
use crate::line_reader::LineReader;
use crate::results::{ResultsError, StoredResults, error_line, unfinished};
use crate::storage::{BlobStore, BlobWriter, StorageError};

/// Input is read, and output written, in parts of this size.
const PART_BYTES: usize = 1 << 20;

/// Why a batch cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// The storage does not work now; the step is to be repeated.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The batch fails for these reasons.
    #[error("{}", .0.first().map_or("the batch failed", |problem| &problem.message))]
    Fatal(Vec<InputProblem>),
}

impl RunError {
    pub(crate) fn fatal(code: &str, message: String) -> Self {
        Self::Fatal(vec![InputProblem { code: code.to_owned(), message, param: None, line: None }])
    }
}

impl From<ResultsError> for RunError {
    fn from(error: ResultsError) -> Self {
        match error {
            ResultsError::Storage(error) if error.is_transient() => Self::Storage(error),
            other => Self::fatal("storage_damaged", format!("the batch's stored results are lost: {other}")),
        }
    }
}

impl From<BatchError> for RunError {
    fn from(error: BatchError) -> Self {
        match error {
            BatchError::Storage(error) if error.is_transient() => Self::Storage(error),
            other => Self::fatal("storage_damaged", other.to_string()),
        }
    }
}

/// Reads and checks the input of a batch.
pub(crate) async fn scan_input(
    catalog: &Catalog,
    batch: &BatchRecord,
    max_line_bytes: usize,
) -> Result<Vec<LineSpan>, RunError> {
    let file = catalog.input_of(batch)?;
    let mut scanner = InputScanner::new(batch.endpoint, max_line_bytes);
    let (mut checksum, mut offset) = (crc32fast::Hasher::new(), 0);
    loop {
        let part = match catalog.store().read(&file.content_key(), offset, PART_BYTES).await {
            Err(StorageError::NotFound(key)) => {
                return Err(RunError::fatal("storage_damaged", format!("{key} is missing")));
            }
            part => part?,
        };
        if part.is_empty() {
            break;
        }
        checksum.update(&part);
        offset += part.len() as u64;
        scanner.push(&part);
    }
    if offset != file.bytes || checksum.finalize() != file.crc32 {
        let text = format!("the content of {} does not match its checksum; upload it again", file.id);
        return Err(RunError::fatal("storage_damaged", text));
    }
    scanner.finish().map_err(RunError::Fatal)
}

/// One output file that is being written. It is created with the first line.
struct OutputWriter<'a> {
    store: &'a dyn BlobStore,
    record: FileRecord,
    writer: Option<Box<dyn BlobWriter>>,
    buffer: BytesMut,
    checksum: crc32fast::Hasher,
}

impl<'a> OutputWriter<'a> {
    fn new(store: &'a dyn BlobStore, batch: &BatchRecord, id: &str, suffix: &str) -> Self {
        let record = FileRecord {
            id: id.to_owned(),
            tenant: batch.tenant.clone(),
            filename: format!("{}_{suffix}.jsonl", batch.id),
            purpose: FilePurpose::BatchOutput,
            bytes: 0,
            crc32: 0,
            created_at: unix_now(),
        };
        Self { store, record, writer: None, buffer: BytesMut::new(), checksum: crc32fast::Hasher::new() }
    }

    async fn push(&mut self, line: &[u8]) -> Result<(), StorageError> {
        self.buffer.extend_from_slice(line);
        self.checksum.update(line);
        self.record.bytes += line.len() as u64;
        if self.buffer.len() >= PART_BYTES { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<(), StorageError> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            empty => empty.insert(self.store.begin(&self.record.content_key()).await?),
        };
        writer.write(self.buffer.split().freeze()).await
    }

    /// The complete file; `None` without any line.
    async fn finish(mut self) -> Result<Option<FileRecord>, StorageError> {
        if self.record.bytes == 0 {
            return Ok(None);
        }
        self.flush().await?;
        if let Some(writer) = self.writer {
            writer.commit().await?;
        }
        self.record.crc32 = self.checksum.finalize();
        Ok(Some(self.record))
    }
}

/// Writes the output files of a batch that gets this final status. Writing them again replaces them.
pub(crate) async fn write_output(
    catalog: &Catalog,
    batch: &BatchRecord,
    spans: &[LineSpan],
    status: BatchStatus,
) -> Result<FinishedOutput, RunError> {
    let store = catalog.store();
    let results = StoredResults::load(store, &batch.id, spans.len()).await?;
    let mut output = OutputWriter::new(store, batch, &batch.reserved_output, "output");
    let mut errors = OutputWriter::new(store, batch, &batch.reserved_errors, "error");
    let mut reader = results.reader(store);
    for line in 0..spans.len() {
        if let Some(at) = results.location(line) {
            let text = reader.read(at).await?;
            let writer = if at.is_success { &mut output } else { &mut errors };
            writer.push(&text).await?;
        }
    }
    let (mut counts, mut expired): (RequestCounts, u32) = (results.counts(), 0);
    if status == BatchStatus::Expired {
        let input = LineReader::new(store, &batch.input_file);
        for line in unfinished(&results, 0..spans.len()) {
            errors.push(&expired_line(&input, batch, line, spans[line]).await?).await?;
            expired += 1;
        }
    }
    counts.failed += expired;
    let (output, errors) = (output.finish().await?, errors.finish().await?);
    let (has_output, has_errors) = (output.is_some(), errors.is_some());
    for file in [output, errors].into_iter().flatten() {
        catalog.register_file(file).await?;
    }
    Ok(FinishedOutput { status, counts, expired, has_output, has_errors })
}

async fn expired_line(
    input: &LineReader<'_>,
    batch: &BatchRecord,
    line: usize,
    span: LineSpan,
) -> Result<Vec<u8>, RunError> {
    const TEXT: &str = "This request could not be executed before the completion window ended.";
    let text = input.read(span).await?;
    let invalid = |error: String| RunError::fatal("storage_damaged", format!("line {line}: {error}"));
    let parsed = parse_line(&text, batch.endpoint).map_err(|error| invalid(error.to_string()))?;
    let result = error_line((line as u32, &parsed.custom_id), "batch_expired", TEXT);
    Ok((result.map_err(|error| invalid(error.to_string()))?.text + "\n").into_bytes())
}
