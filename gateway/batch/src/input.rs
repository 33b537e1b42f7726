//! Input of a batch: one request per line, in JSON.

use std::borrow::Cow;
use std::collections::HashSet;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::batch::{BatchEndpoint, InputProblem};

/// Longest `custom_id` in bytes.
pub(crate) const MAX_CUSTOM_ID_LEN: usize = 512;
/// Most lines of a batch, as in OpenAI's API.
pub(crate) const MAX_LINES: usize = 50_000;
/// Most problems that are reported for one input.
pub(crate) const MAX_PROBLEMS: usize = 100;

/// Why a line is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    #[error("the line is longer than {0} bytes; shorten the request")]
    TooLong(usize),
    #[error("the line is not a JSON object with `custom_id`, `method`, `url` and `body`: {0}")]
    Json(String),
    #[error("`custom_id` must be a text of 1 to {MAX_CUSTOM_ID_LEN} bytes")]
    CustomId,
    #[error("`custom_id` {0:?} is that of an earlier line; give each line its own")]
    DuplicateCustomId(String),
    #[error("`method` is {0:?}; it must be \"POST\"")]
    Method(String),
    #[error("`url` is {url:?}; it must be the batch's endpoint, {}", .endpoint.path())]
    Url { url: String, endpoint: BatchEndpoint },
    #[error("`body` must be a JSON object")]
    Body,
    #[error("`body.stream` must not be set: results of a batch are not streamed")]
    Stream,
}

impl LineError {
    /// Code and member of the problem, as the API reports them.
    fn code(&self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::TooLong(_) => ("line_too_long", None),
            Self::Json(_) => ("invalid_json_line", None),
            Self::CustomId => ("invalid_custom_id", Some("custom_id")),
            Self::DuplicateCustomId(_) => ("duplicate_custom_id", Some("custom_id")),
            Self::Method(_) => ("invalid_method", Some("method")),
            Self::Url { .. } => ("mismatched_endpoint", Some("url")),
            Self::Body => ("invalid_body", Some("body")),
            Self::Stream => ("invalid_body", Some("body.stream")),
        }
    }

    fn problem(&self, line: u64) -> InputProblem {
        let (code, param) = self.code();
        InputProblem {
            code: code.to_owned(),
            message: self.to_string(),
            param: param.map(str::to_owned),
            line: Some(line),
        }
    }
}

/// A valid line.
#[derive(Debug)]
pub struct ParsedLine<'a> {
    pub custom_id: Cow<'a, str>,
    /// The request's body as it was sent.
    pub body: &'a str,
}

#[derive(Deserialize)]
struct LineMembers<'a> {
    #[serde(borrow)]
    custom_id: Cow<'a, str>,
    #[serde(borrow)]
    method: Cow<'a, str>,
    #[serde(borrow)]
    url: Cow<'a, str>,
    #[serde(borrow)]
    body: &'a RawValue,
}

#[derive(Deserialize)]
struct BodyMembers {
    #[serde(default)]
    stream: Value,
}

/// Parses one line of a batch for `endpoint`.
///
/// # Errors
/// [`LineError`] says which member is invalid.
pub fn parse_line(line: &[u8], endpoint: BatchEndpoint) -> Result<ParsedLine<'_>, LineError> {
    let text = std::str::from_utf8(line).map_err(|error| LineError::Json(error.to_string()))?;
    let members: LineMembers<'_> =
        serde_json::from_str(text).map_err(|error| LineError::Json(error.to_string()))?;
    if members.custom_id.is_empty() || members.custom_id.len() > MAX_CUSTOM_ID_LEN {
        return Err(LineError::CustomId);
    }
    if members.method != "POST" {
        return Err(LineError::Method(members.method.chars().take(MAX_CUSTOM_ID_LEN).collect()));
    }
    if members.url != endpoint.path() {
        return Err(LineError::Url { url: members.url.chars().take(MAX_CUSTOM_ID_LEN).collect(), endpoint });
    }
    let body = members.body.get();
    if !body.starts_with('{') {
        return Err(LineError::Body);
    }
    let checked: BodyMembers =
        serde_json::from_str(body).map_err(|error| LineError::Json(error.to_string()))?;
    if !matches!(checked.stream, Value::Null | Value::Bool(false)) {
        return Err(LineError::Stream);
    }
    Ok(ParsedLine { custom_id: members.custom_id, body })
}

/// Where a line is in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LineSpan {
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// Checks an input that arrives in parts, and finds its lines. Blank lines are skipped.
#[derive(Debug)]
pub struct InputScanner {
    endpoint: BatchEndpoint,
    max_line_bytes: usize,
    /// Start of a line whose end has not arrived.
    partial: Vec<u8>,
    /// The rest of the line is skipped, because it is too long.
    is_skipping: bool,
    /// Position after the last part.
    position: u64,
    /// Lines so far, blank ones included.
    lines: u64,
    spans: Vec<LineSpan>,
    custom_ids: HashSet<Box<str>>,
    problems: Vec<InputProblem>,
    /// The rest is not scanned.
    is_hopeless: bool,
}

impl InputScanner {
    /// A scanner for lines of up to `max_line_bytes`.
    #[must_use]
    pub fn new(endpoint: BatchEndpoint, max_line_bytes: usize) -> Self {
        Self {
            endpoint,
            max_line_bytes: max_line_bytes.min(u32::MAX as usize),
            partial: Vec::new(),
            is_skipping: false,
            position: 0,
            lines: 0,
            spans: Vec::new(),
            custom_ids: HashSet::new(),
            problems: Vec::new(),
            is_hopeless: false,
        }
    }

    /// Whether so many problems were found that the rest need not be scanned.
    #[must_use]
    pub fn is_hopeless(&self) -> bool {
        self.is_hopeless
    }

    /// Scans the next part of the input.
    pub fn push(&mut self, mut part: &[u8]) {
        while let Some(end) = part.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&part[..end], &part[end + 1..]);
            if self.partial.is_empty() && !self.is_skipping {
                self.end_line(line, line.len());
            } else {
                self.extend(line);
                let whole = std::mem::take(&mut self.partial);
                self.end_line(&whole, line.len());
            }
            self.position += 1;
            part = rest;
        }
        self.extend(part);
        self.position += part.len() as u64;
    }

    /// Adds to the unfinished line.
    fn extend(&mut self, part: &[u8]) {
        if self.partial.len() + part.len() > self.max_line_bytes {
            self.is_skipping = true;
        }
        if self.is_skipping {
            self.partial = Vec::new();
        } else {
            self.partial.extend_from_slice(part);
        }
    }

    /// Checks a whole line, whose last `new` bytes begin at the current position.
    fn end_line(&mut self, line: &[u8], new: usize) {
        self.lines += 1;
        self.position += new as u64;
        let is_too_long = std::mem::take(&mut self.is_skipping) || line.len() > self.max_line_bytes;
        if self.is_hopeless {
            return;
        }
        let span = LineSpan { offset: self.position - line.len() as u64, len: line.len() as u32 };
        let result = match (is_too_long, line.trim_ascii().is_empty()) {
            (true, _) => Err(LineError::TooLong(self.max_line_bytes)),
            (false, true) => return,
            (false, false) => parse_line(line, self.endpoint).and_then(|parsed| {
                if self.custom_ids.insert(parsed.custom_id.as_ref().into()) {
                    return Ok(());
                }
                Err(LineError::DuplicateCustomId(parsed.custom_id.into_owned()))
            }),
        };
        match result {
            Err(error) => {
                self.problems.push(error.problem(self.lines));
                self.is_hopeless = self.problems.len() >= MAX_PROBLEMS;
            }
            Ok(()) if self.spans.len() == MAX_LINES => {
                let text = format!("the file has more than {MAX_LINES} lines; split it into several batches");
                self.fail("too_many_lines", text);
            }
            Ok(()) => self.spans.push(span),
        }
    }

    /// Adds a last problem, after which nothing is scanned.
    fn fail(&mut self, code: &str, message: String) {
        self.problems.push(InputProblem { code: code.to_owned(), message, param: None, line: None });
        self.is_hopeless = true;
    }

    /// All problems of the complete input.
    #[must_use]
    pub fn problems(self) -> Vec<InputProblem> {
        self.finish().err().unwrap_or_default()
    }

    /// The lines, or all problems.
    pub(crate) fn finish(mut self) -> Result<Vec<LineSpan>, Vec<InputProblem>> {
        if !self.partial.is_empty() || self.is_skipping {
            // The last line may lack its line feed. Its bytes are before the position already.
            let whole = std::mem::take(&mut self.partial);
            self.end_line(&whole, 0);
        }
        if self.problems.is_empty() && self.spans.is_empty() {
            self.fail("empty_file", "the file has no requests; write one per line".to_owned());
        }
        if self.problems.is_empty() { Ok(self.spans) } else { Err(self.problems) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ENDPOINT: BatchEndpoint = BatchEndpoint::Completions;

    fn line(id: &str) -> String {
        format!(
            r#"{{"custom_id":"{id}","method":"POST","url":"/v1/completions","body":{{"prompt":"{id}"}}}}"#
        )
    }

    fn scan(input: &[u8], part: usize) -> Result<Vec<LineSpan>, Vec<InputProblem>> {
        let mut scanner = InputScanner::new(ENDPOINT, 200);
        input.chunks(part).for_each(|part| scanner.push(part));
        scanner.finish()
    }

    fn codes(input: &str) -> Vec<(String, Option<u64>)> {
        let problems = scan(input.as_bytes(), 7).unwrap_err();
        problems.into_iter().map(|problem| (problem.code, problem.line)).collect()
    }

    #[test]
    fn lines_are_found_with_and_without_a_last_line_feed() {
        let (a, b) = (line("a"), line("b"));
        for input in [format!("{a}\n{b}"), format!("{a}\n{b}\n"), format!("\n{a}\r\n\n  \n{b}\n\n")] {
            let spans = scan(input.as_bytes(), 5).unwrap();
            let lines: Vec<&str> =
                spans.iter().map(|span| input[span.offset as usize..][..span.len as usize].trim()).collect();
            assert_eq!(lines, [&a, &b], "{input:?}");
        }
        let parsed = parse_line(a.as_bytes(), ENDPOINT).unwrap();
        assert_eq!((parsed.custom_id.as_ref(), parsed.body), ("a", r#"{"prompt":"a"}"#));
    }

    #[test]
    fn invalid_lines_are_reported_with_their_numbers() {
        let good = line("a");
        let with = |from: &str, to: &str| good.replace(from, to);
        for (bad, code) in [
            ("x".to_owned(), "invalid_json_line"),
            ("{}".to_owned(), "invalid_json_line"),
            (with("\"body\":", "\"body\":{},\"body\":"), "invalid_json_line"),
            (with("\"a\",\"method", "1,\"method"), "invalid_json_line"),
            (with("\"a\",\"method", "\"\",\"method"), "invalid_custom_id"),
            (with("POST", "GET"), "invalid_method"),
            (with("/v1/completions", "/v1/embeddings"), "mismatched_endpoint"),
            (with("{\"prompt\":\"a\"}", "[1]"), "invalid_body"),
            (with("\"prompt\":\"a\"", "\"stream\":true"), "invalid_body"),
            (with("\"prompt\":\"a\"", &format!("\"prompt\":\"{}\"", "a".repeat(200))), "line_too_long"),
        ] {
            assert_eq!(codes(&format!("{}\n{bad}\n", line("b"))), [(code.to_owned(), Some(2))], "{bad}");
        }
        assert_eq!(codes(&format!("{good}\n\n{good}")), [("duplicate_custom_id".to_owned(), Some(3))]);
        assert_eq!(codes("\n \n"), [("empty_file".to_owned(), None)]);
        assert_eq!(codes(&"x\n".repeat(1000)).len(), MAX_PROBLEMS);
        assert!(parse_line(with("\"prompt\":\"a\"", "\"stream\":false").as_bytes(), ENDPOINT).is_ok());
    }

    #[test]
    fn too_many_lines_are_rejected() {
        let input: String = (0..=MAX_LINES).map(|number| line(&number.to_string()) + "\n").collect();
        let problems = scan(input.as_bytes(), 1 << 16).unwrap_err();
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].code, "too_many_lines");
    }

    proptest! {
        #[test]
        fn parts_do_not_matter(
            lines in prop::collection::vec(prop_oneof![
                "[a-c]{1,2}".prop_map(|id| line(&id)),
                "[a-c]{1,2}".prop_map(|id| line(&id) + "\r"),
                Just(String::new()),
                "[{}\": a]{0,9}",
                Just("y".repeat(300)),
            ], 0..12),
            part in 1_usize..300,
            ends in any::<bool>(),
        ) {
            let input = lines.join("\n") + if ends { "\n" } else { "" };
            prop_assert_eq!(scan(input.as_bytes(), part), scan(input.as_bytes(), usize::MAX));
        }

        #[test]
        fn any_bytes_are_scanned(input in prop::collection::vec(any::<u8>(), 0..500), part in 1_usize..50) {
            let spans = scan(&input, part);
            for span in spans.unwrap_or_default() {
                let line = &input[span.offset as usize..][..span.len as usize];
                prop_assert!(parse_line(line, ENDPOINT).is_ok());
            }
        }
    }
}
