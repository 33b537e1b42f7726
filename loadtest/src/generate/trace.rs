//! Reading traces: Mooncake's and Qwen-Bailian's JSON lines, aiperf's conversations, and Azure's CSV.

use std::io::BufRead;
use std::num::ParseIntError;
use std::path::Path;
use std::time::{Duration, SystemTimeError};

use serde::Deserialize;

use super::session_trace::{SessionStarts, SessionTraceReader};

/// Maximum number of rows; a longer trace is an error, because rows are held in memory.
const MAX_ROWS: usize = 2_000_000;
/// Maximum line length in bytes.
const MAX_LINE_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of tokens of one prompt or response.
const MAX_TOKENS: u64 = 16_000_000;
/// Tokens per block id in Mooncake's traces.
const MOONCAKE_BLOCK: usize = 512;
/// Tokens per block id in Qwen-Bailian's traces.
const BAILIAN_BLOCK: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceRow {
    /// Arrival time after the first request.
    pub at: Duration,
    pub input_tokens: usize,
    pub output_tokens: u32,
    /// One id per block of [`TraceRow::block_tokens`] tokens, the last partial one included. Equal ids mean an equal
    /// prefix up to the end of the block. Empty if the trace has none.
    pub blocks: Vec<u64>,
    pub block_tokens: usize,
}

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceFileError {
    /// The file could not be read.
    #[error("cannot read the trace {path}: {source}")]
    Read { path: String, source: std::io::Error },
    /// A line is not a request.
    #[error("line {line} of the trace: {source}")]
    Line {
        /// Line number, from 1.
        line: usize,
        source: TraceLineError,
    },
    /// The trace has no rows.
    #[error("the trace has no requests")]
    Empty,
}

/// Why a line is not a request.
#[derive(Debug, thiserror::Error)]
pub enum TraceLineError {
    #[error("more than {MAX_ROWS} requests; use --requests or a shorter file")]
    TooManyRows,
    #[error(
        "neither a JSON object with timestamp, input_length and output_length nor a CSV header with TIMESTAMP"
    )]
    UnknownFormat,
    #[error("not a request: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the CSV header has no column {column}; columns are {}", .columns.join(", "))]
    NoColumn { column: &'static str, columns: Vec<String> },
    #[error("only {0} columns")]
    FewColumns(usize),
    #[error("{text:?} is not a number of tokens: {source}")]
    Tokens { text: String, source: ParseIntError },
    #[error("{0} tokens exceed the limit of {MAX_TOKENS}")]
    TooManyTokens(u64),
    #[error("{text:?} is not a time: {source}")]
    Time { text: String, source: humantime::TimestampError },
    #[error("{text:?}: {source}")]
    BeforeEpoch { text: String, source: SystemTimeError },
    #[error("the timestamp {0} is out of range")]
    TimeRange(f64),
}

#[derive(Deserialize)]
struct JsonTraceRow {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    #[serde(default)]
    hash_ids: Vec<i64>,
    /// Only Qwen-Bailian's rows have one; their times are in seconds.
    chat_id: Option<serde::de::IgnoredAny>,
}

/// How a trace file is read.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TraceReadOptions {
    /// Maximum number of rows.
    pub limit: Option<usize>,
    /// Mean rate at which the conversations of aiperf's datasets start; `None` for their recorded times.
    pub sessions_per_second: Option<f64>,
}

/// Reads a trace file; the format is detected from its first line.
///
/// # Errors
/// The file cannot be read, or a line is not a request.
pub fn read_trace(path: &Path, limit: Option<usize>) -> Result<Vec<TraceRow>, TraceFileError> {
    read_trace_with(path, TraceReadOptions { limit, ..TraceReadOptions::default() })
}

/// [`read_trace`] with all options.
///
/// # Errors
/// As for [`read_trace`].
pub fn read_trace_with(path: &Path, options: TraceReadOptions) -> Result<Vec<TraceRow>, TraceFileError> {
    let TraceReadOptions { limit, sessions_per_second } = options;
    let read_error = |source| TraceFileError::Read { path: path.display().to_string(), source };
    let file = std::fs::File::open(path).map_err(read_error)?;
    let mut lines = Vec::new();
    let mut reader = std::io::BufReader::new(file);
    let max_lines = limit.unwrap_or(MAX_ROWS).min(MAX_ROWS).saturating_add(1);
    loop {
        let mut line = Vec::new();
        let read = std::io::Read::take(&mut reader, MAX_LINE_BYTES as u64)
            .read_until(b'\n', &mut line)
            .map_err(read_error)?;
        if read == 0 || lines.len() > max_lines {
            break;
        }
        lines.push(String::from_utf8_lossy(&line).into_owned());
    }
    let sessions = SessionTraceReader::new(sessions_per_second.map(SessionStarts::with_rate));
    let mut rows = parse_rows(lines.iter().map(String::as_str), sessions)?;
    if let Some(limit) = limit {
        rows.truncate(limit);
    }
    Ok(rows)
}

/// Parses the lines of a trace. Rows are returned in order of arrival, the first at zero, and rows with equal
/// timestamps are spread over the time to the next timestamp.
///
/// # Errors
/// A line is not a request, or there is none.
pub fn parse_trace<'a>(lines: impl IntoIterator<Item = &'a str>) -> Result<Vec<TraceRow>, TraceFileError> {
    parse_rows(lines, SessionTraceReader::new(None))
}

fn parse_rows<'a>(
    lines: impl IntoIterator<Item = &'a str>,
    mut sessions: SessionTraceReader,
) -> Result<Vec<TraceRow>, TraceFileError> {
    let mut rows: Vec<(f64, TraceRow)> = Vec::new();
    let mut columns = None;
    for (index, line) in lines.into_iter().enumerate() {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let number = index + 1;
        let at_line = |source| TraceFileError::Line { line: number, source };
        if rows.len() >= MAX_ROWS {
            return Err(at_line(TraceLineError::TooManyRows));
        }
        let row = if line.starts_with('{') && SessionTraceReader::is_session_row(line) {
            sessions.row(line).map_err(at_line)?
        } else if line.starts_with('{') {
            json_row(line).map_err(at_line)?
        } else if columns.is_none() && line.to_ascii_uppercase().contains("TIMESTAMP") {
            columns = Some(CsvTraceColumns::of(line).map_err(at_line)?);
            continue;
        } else if let Some(columns) = &columns {
            columns.row(line).map_err(at_line)?
        } else {
            return Err(at_line(TraceLineError::UnknownFormat));
        };
        rows.push(row);
    }
    if rows.is_empty() {
        return Err(TraceFileError::Empty);
    }
    rows.sort_by(|left, right| left.0.total_cmp(&right.0));
    Ok(spread_equal_timestamps(rows))
}

pub(super) fn tokens(value: u64) -> Result<usize, TraceLineError> {
    let count = usize::try_from(value).ok().filter(|_| value <= MAX_TOKENS);
    count.ok_or(TraceLineError::TooManyTokens(value))
}

/// Number of blocks of a prompt, the last partial one included.
pub(super) fn block_count(tokens: usize, block_tokens: usize) -> usize {
    tokens.div_ceil(block_tokens)
}

pub(super) fn seconds(value: f64) -> Result<f64, TraceLineError> {
    // A limit of about a thousand years keeps the arithmetic below exact enough and durations representable.
    if value.is_finite() && value.abs() < 4e10 { Ok(value) } else { Err(TraceLineError::TimeRange(value)) }
}

fn json_row(line: &str) -> Result<(f64, TraceRow), TraceLineError> {
    let row: JsonTraceRow = serde_json::from_str(line)?;
    let (at, block_tokens) = match row.chat_id {
        Some(_) => (row.timestamp, BAILIAN_BLOCK),
        None => (row.timestamp / 1_000.0, MOONCAKE_BLOCK),
    };
    let input_tokens = tokens(row.input_length)?;
    let max_blocks = block_count(input_tokens, block_tokens);
    let blocks: Vec<u64> = row.hash_ids.iter().map(|id| id.cast_unsigned()).take(max_blocks).collect();
    let output_tokens = u32::try_from(tokens(row.output_length)?).unwrap_or(u32::MAX);
    Ok((seconds(at)?, TraceRow { at: Duration::ZERO, input_tokens, output_tokens, blocks, block_tokens }))
}

struct CsvTraceColumns {
    time: usize,
    input: usize,
    output: usize,
}

impl CsvTraceColumns {
    fn of(header: &str) -> Result<Self, TraceLineError> {
        let names: Vec<String> = header.split(',').map(|name| name.trim().to_ascii_lowercase()).collect();
        let find = |column: &'static str| {
            let found = names.iter().position(|name| name == column);
            found.ok_or_else(|| TraceLineError::NoColumn { column, columns: names.clone() })
        };
        Ok(Self { time: find("timestamp")?, input: find("contexttokens")?, output: find("generatedtokens")? })
    }

    fn row(&self, line: &str) -> Result<(f64, TraceRow), TraceLineError> {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let cell = |index: usize| cells.get(index).copied().ok_or(TraceLineError::FewColumns(cells.len()));
        let count = |index: usize| {
            let text = cell(index)?;
            let value = text.parse();
            tokens(value.map_err(|source| TraceLineError::Tokens { text: text.to_owned(), source })?)
        };
        let row = TraceRow {
            at: Duration::ZERO,
            input_tokens: count(self.input)?,
            output_tokens: u32::try_from(count(self.output)?).unwrap_or(u32::MAX),
            blocks: Vec::new(),
            block_tokens: MOONCAKE_BLOCK,
        };
        Ok((seconds(timestamp(cell(self.time)?)?)?, row))
    }
}

/// Seconds of `2023-11-16 18:15:46.6805900`, or of a plain number.
fn timestamp(text: &str) -> Result<f64, TraceLineError> {
    if let Ok(plain) = text.parse::<f64>() {
        return Ok(plain);
    }
    // The time zone is ignored: only differences count.
    let text = text.split('+').next().unwrap_or(text).trim_end_matches('Z');
    let canonical = text.trim().replacen(' ', "T", 1) + "Z";
    let time = humantime::parse_rfc3339_weak(&canonical)
        .map_err(|source| TraceLineError::Time { text: text.to_owned(), source })?;
    let since = time
        .duration_since(std::time::UNIX_EPOCH)
        .map_err(|source| TraceLineError::BeforeEpoch { text: text.to_owned(), source })?;
    Ok(since.as_secs_f64())
}

/// Spreads rows of equal time over the gap to the next time; the last group uses the previous gap.
fn spread_equal_timestamps(rows: Vec<(f64, TraceRow)>) -> Vec<TraceRow> {
    let start = rows.first().map_or(0.0, |row| row.0);
    let times: Vec<f64> = rows.iter().map(|row| row.0).collect();
    let mut spread = Vec::with_capacity(rows.len());
    let mut group = 0;
    let mut gap = 0.0;
    for (index, (time, mut row)) in rows.into_iter().enumerate() {
        if index == 0 || times[index - 1] < time {
            group = index;
            // The times are sorted: the group ends where a later time starts.
            let end = index + times[index..].partition_point(|other| *other <= time);
            if let Some(next) = times.get(end) {
                gap = (next - time) / count(end - group);
            } else {
                // The last group uses the previous group's gap, divided by its own number of rows.
                let before = if group > 0 { time - times[group - 1] } else { 0.0 };
                gap = before / count(end - group);
            }
        }
        row.at = Duration::try_from_secs_f64(time - start + gap * count(index - group)).unwrap_or_default();
        spread.push(row);
    }
    spread
}

#[expect(clippy::cast_precision_loss, reason = "at most MAX_ROWS")]
fn count(rows: usize) -> f64 {
    rows as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equal_stamps_are_spread_over_the_gap() {
        let row = |ms: u64| {
            format!(r#"{{"timestamp":{ms},"input_length":600,"output_length":3,"hash_ids":[1,2]}}"#)
        };
        let lines = [row(0), row(0), row(0), row(3_000), row(6_000), row(6_000)];
        let rows = parse_trace(lines.iter().map(String::as_str)).expect("a trace");
        let at: Vec<u128> = rows.iter().map(|row| row.at.as_millis()).collect();
        assert_eq!(at, [0, 1_000, 2_000, 3_000, 6_000, 7_500]);
        assert_eq!((rows[0].blocks.as_slice(), rows[0].block_tokens), ([1, 2].as_slice(), 512));
    }

    #[test]
    fn azure_and_bailian_are_read() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n";
        let rows = parse_trace(azure.lines()).expect("azure");
        assert_eq!((rows[0].input_tokens, rows[1].output_tokens), (374, 109));
        assert_eq!(rows[1].at.as_millis(), 4_314);
        let bailian = r#"{"chat_id": 5, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 9, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}"#;
        assert_eq!(parse_trace([bailian]).expect("bailian")[0].block_tokens, 16);
    }

    #[test]
    fn error_names_the_invalid_line() {
        let error =
            parse_trace(["{\"timestamp\":0,\"input_length\":1,\"output_length\":1}", "{\"timestamp\":1}"]);
        assert!(error.expect_err("bad").to_string().starts_with("line 2 of the trace: "));
        assert!(matches!(parse_trace(["", " "]), Err(TraceFileError::Empty)));
    }

    #[test]
    fn the_recorded_conversation_trace_is_read() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/conversation_1000.jsonl");
        let rows = read_trace(&path, None).expect("the trace");
        assert_eq!(rows.len(), 1_000);
        assert!(rows.iter().all(|row| row.blocks.len() == row.input_tokens.div_ceil(512)));
        assert!(rows.windows(2).all(|pair| pair[0].at <= pair[1].at));
        assert_eq!(read_trace(&path, Some(10)).expect("ten").len(), 10);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,200}", rows in prop::collection::vec((any::<f64>(), any::<u64>(), any::<u64>()), 0..5)) {
            let _ = parse_trace(text.lines());
            let _ = parse_trace(["TIMESTAMP,ContextTokens,GeneratedTokens", text.as_str()]);
            let lines: Vec<String> = rows.iter()
                .map(|(at, input, output)| format!(r#"{{"timestamp":{at:?},"input_length":{input},"output_length":{output}}}"#))
                .collect();
            let _ = parse_trace(lines.iter().map(String::as_str));
            let turns: Vec<String> = rows.iter()
                .map(|(at, input, output)| format!(r#"{{"session_id":"s","delay":{at:?},"input_length":{input},"output_length":{output}}}"#))
                .collect();
            let _ = parse_trace(turns.iter().map(String::as_str));
        }
    }
}
