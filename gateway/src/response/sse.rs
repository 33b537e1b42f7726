//! Checks server-sent events on their way through, without copying those that arrive whole.

use std::borrow::Cow;
use std::fmt;
use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::request_body::StreamEnd;

/// Longest event that is buffered: a chunk with many logprobs is tens of kilobytes.
const MAX_EVENT_BYTES: usize = 4 << 20;

/// Longest first event that is kept.
const MAX_FIRST_PAYLOAD_BYTES: usize = 4 << 10;

/// Passes complete events on and buffers an incomplete one until its end arrives.
#[derive(Debug)]
pub struct SseFramer {
    end: StreamEnd,
    /// Start of an incomplete event. It contains no event end, so it is not searched again.
    partial: BytesMut,
    /// Payload of the first event of an API whose events have types, unless it is long. Payloads are copied: a slice would keep the buffer
    /// into which the connection was read, of eight kilobytes and more, as long as the stream is open.
    first_payload: Vec<u8>,
    /// Payload of the last `data:` line that was JSON.
    last_payload: Vec<u8>,
    /// Payload of the one before.
    previous_payload: Vec<u8>,
    events: u64,
    /// Events before the first that depends on the model's output.
    preamble: u64,
    /// Whether the line before was `event:` with the type of a preamble, or of a last event.
    named: Option<EventClass>,
    done: bool,
    /// Bytes searched, checked or copied so far, for the test that the work is linear in the input.
    #[cfg(test)]
    processed: usize,
}

/// What an event's type says about its place in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EventClass {
    Preamble,
    Output,
    Last,
}

/// Events that an engine sends as soon as it accepts a request.
const PREAMBLE: [&str; 5] =
    ["response.created", "response.queued", "response.in_progress", "message_start", "ping"];

impl EventClass {
    fn of_type(name: &str, last: &[&str]) -> Self {
        if last.contains(&name) {
            Self::Last
        } else if PREAMBLE.contains(&name) {
            Self::Preamble
        } else {
            Self::Output
        }
    }
}

/// Why a stream must be aborted.
#[derive(Debug, PartialEq)]
pub enum SseError {
    /// Not the event-stream format.
    Malformed(&'static str),
    /// The JSON of an error event that the engine sent.
    EngineError(Bytes),
}

impl SseFramer {
    /// A framer of a stream that ends in this way.
    #[must_use]
    pub fn new(end: StreamEnd) -> Self {
        Self {
            end,
            partial: BytesMut::new(),
            first_payload: Vec::new(),
            last_payload: Vec::new(),
            previous_payload: Vec::new(),
            events: 0,
            preamble: 0,
            named: None,
            done: false,
            #[cfg(test)]
            processed: 0,
        }
    }

    /// Takes a chunk and returns the events that are complete now, possibly none.
    ///
    /// # Errors
    ///
    /// [`SseError`] if the stream must be aborted.
    pub fn push(&mut self, chunk: Bytes) -> Result<Bytes, SseError> {
        let complete = if self.partial.is_empty() {
            let end = last_event_end(&chunk, 0);
            self.buffer_partial(&chunk[end..])?;
            self.count(chunk.len() + self.partial.len());
            chunk.slice(..end)
        } else {
            let searched = self.partial.len();
            self.partial.extend_from_slice(&chunk);
            let end = last_event_end(&self.partial, searched);
            self.count(2 * chunk.len());
            if end == 0 {
                self.buffer_partial(&[])?;
                return Ok(Bytes::new());
            }
            // A new buffer for the rest, which is shorter than the chunk: the memory of the events is freed when they are sent.
            let complete = self.partial.split_to(end).freeze();
            let rest = std::mem::take(&mut self.partial);
            self.buffer_partial(&rest)?;
            self.count(rest.len());
            complete
        };
        self.check(&complete)?;
        Ok(complete)
    }

    /// Buffers the start of an event.
    fn buffer_partial(&mut self, rest: &[u8]) -> Result<(), SseError> {
        self.partial.extend_from_slice(rest);
        if self.partial.len() > MAX_EVENT_BYTES {
            return Err(SseError::Malformed("sent an event of more than 4 MiB"));
        }
        Ok(())
    }

    #[cfg(test)]
    fn count(&mut self, bytes: usize) {
        self.processed += bytes;
    }

    #[cfg(not(test))]
    fn count(&mut self, _bytes: usize) {}

    /// Called at the end of the body. Returns the remaining bytes to pass on.
    ///
    /// # Errors
    ///
    /// [`SseError`] if the stream was truncated, or the remaining bytes must not be passed on.
    pub fn finish(&mut self) -> Result<Bytes, SseError> {
        let rest = self.partial.split().freeze();
        self.check(&rest)?;
        match self.end {
            _ if self.done => Ok(rest),
            StreamEnd::Body => Ok(rest),
            StreamEnd::Done => Err(SseError::Malformed("ended its stream without `data: [DONE]`")),
            StreamEnd::EventType(_) => Err(SseError::Malformed("ended its stream without its last event")),
        }
    }

    /// Whether all events so far were sent before the model's first output. An engine sends them as soon as it has accepted a request, so
    /// they do not show that it will serve it.
    #[must_use]
    pub fn is_in_preamble(&self) -> bool {
        matches!(self.end, StreamEnd::EventType(_)) && !self.done && self.preamble == self.events
    }

    /// JSON payload of the first event, which has the id and the input tokens of a message; empty in other APIs.
    #[must_use]
    pub fn first_payload(&self) -> &[u8] {
        &self.first_payload
    }

    /// JSON payload of the last event, which carries usage.
    #[must_use]
    pub fn last_payload(&self) -> &[u8] {
        &self.last_payload
    }

    /// JSON payload of the event before the last: if usage has its own event, this one carries the finish reason.
    #[must_use]
    pub fn previous_payload(&self) -> &[u8] {
        &self.previous_payload
    }

    /// Number of events, without `[DONE]` and without those before the first output.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events - self.preamble
    }

    fn check(&mut self, events: &Bytes) -> Result<(), SseError> {
        self.count(events.len());
        let mut from = 0;
        while from < events.len() {
            let to = memchr::memchr(b'\n', &events[from..]).map_or(events.len(), |at| from + at);
            let line = events[from..to].strip_suffix(b"\r").unwrap_or(&events[from..to]);
            if let Some(payload) = line.strip_prefix(b"data:") {
                let skipped = payload.len() - payload.trim_ascii_start().len();
                let start = from + b"data:".len() + skipped;
                self.check_payload(&events[start..from + line.len()])?;
            } else if let (StreamEnd::EventType(last), Some(name)) = (self.end, line.strip_prefix(b"event:"))
            {
                let name = std::str::from_utf8(name.trim_ascii()).unwrap_or_default();
                self.named = Some(EventClass::of_type(name, last));
            } else if !is_field(line) {
                return Err(SseError::Malformed("sent data that is not a server-sent event"));
            }
            from = to + 1;
        }
        Ok(())
    }

    /// Records the place of an event in a stream whose events have types: by its name, or else by its payload.
    fn classify(&mut self, payload: &[u8]) {
        let StreamEnd::EventType(last) = self.end else { return };
        let of_payload = || EventClass::of_type(&event_type(payload).unwrap_or_default(), last);
        match self.named.take().unwrap_or_else(of_payload) {
            EventClass::Preamble if self.preamble == self.events => self.preamble += 1,
            EventClass::Preamble | EventClass::Output => {}
            EventClass::Last => self.done = true,
        }
    }

    fn check_payload(&mut self, payload: &[u8]) -> Result<(), SseError> {
        if reports_error(payload) {
            return Err(SseError::EngineError(Bytes::copy_from_slice(payload)));
        }
        if payload.trim_ascii_end() == b"[DONE]" {
            self.done |= matches!(self.end, StreamEnd::Done);
        } else if payload.starts_with(b"{") && payload.trim_ascii_end().ends_with(b"}") {
            self.classify(payload);
            let is_kept = self.events == 0 && payload.len() <= MAX_FIRST_PAYLOAD_BYTES;
            if is_kept && matches!(self.end, StreamEnd::EventType(_)) {
                self.first_payload = payload.to_vec();
            }
            std::mem::swap(&mut self.previous_payload, &mut self.last_payload);
            copy_into(&mut self.last_payload, payload);
            self.events += 1;
        } else {
            return Err(SseError::Malformed("sent an event that is not JSON"));
        }
        Ok(())
    }
}

/// Copies a payload into the buffer of an earlier one, unless that is much larger.
fn copy_into(buffer: &mut Vec<u8>, payload: &[u8]) {
    if buffer.capacity() > MAX_FIRST_PAYLOAD_BYTES && payload.len() < buffer.capacity() / 2 {
        *buffer = Vec::new();
    }
    buffer.clear();
    buffer.extend_from_slice(payload);
}

/// The `type` of an event in the APIs that have one.
fn event_type(payload: &[u8]) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct TypedEvent<'a> {
        #[serde(borrow)]
        r#type: Cow<'a, str>,
    }
    serde_json::from_slice::<TypedEvent<'_>>(payload).ok().map(|event| event.r#type)
}

/// Lines of the event-stream format other than `data:`.
fn is_field(line: &[u8]) -> bool {
    line.is_empty() || [&b":"[..], b"event:", b"id:", b"retry:"].iter().any(|field| line.starts_with(field))
}

/// Whether an event's JSON is an error: an object with an `error` member at any position, or with `"object":"error"` or `"type":"error"`. All
/// contain the quoted word, so that most events are only searched for it; inside a generated text the quotes are escaped.
fn reports_error(payload: &[u8]) -> bool {
    static WORD: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"error\""));

    WORD.find(payload).is_some()
        && serde_json::from_slice::<ErrorEvent>(payload).is_ok_and(|event| event.is_error)
}

/// Whether an event's members mark it as an error. Of repeated members, any match counts.
struct ErrorEvent {
    is_error: bool,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum EventMember {
    Error,
    Object,
    Type,
    #[serde(other)]
    Other,
}

impl<'de> Deserialize<'de> for ErrorEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ErrorEventVisitor;
        impl<'de> Visitor<'de> for ErrorEventVisitor {
            type Value = ErrorEvent;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<ErrorEvent, A::Error> {
                let mut is_error = false;
                while let Some(member) = members.next_key()? {
                    is_error |= match member {
                        EventMember::Error => members.next_value::<Option<IgnoredAny>>()?.is_some(),
                        EventMember::Object | EventMember::Type => {
                            members.next_value::<&RawValue>()?.get() == "\"error\""
                        }
                        EventMember::Other => members.next_value().map(|IgnoredAny| false)?,
                    };
                }
                Ok(ErrorEvent { is_error })
            }
        }
        deserializer.deserialize_map(ErrorEventVisitor)
    }
}

/// Position after the last blank line that ends at `from` or later.
fn last_event_end(bytes: &[u8], from: usize) -> usize {
    let mut to = bytes.len();
    while let Some(at) = memchr::memrchr(b'\n', &bytes[from..to]).map(|at| from + at) {
        let before = bytes[..at].strip_suffix(b"\r").unwrap_or(&bytes[..at]);
        if before.ends_with(b"\n") {
            return at + 1;
        }
        to = at;
    }
    0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str = "data: {\"a\":1}\n\n: ping\n\nevent: x\ndata: {\"a\":2}\r\n\r\ndata: {\"usage\":{}}\n\ndata: [DONE]\n\n";

    proptest! {
        /// Wherever the network splits a stream, its bytes are unchanged, and each output ends with an event.
        #[test]
        fn splits_do_not_change_the_stream(mut splits in prop::collection::vec(0..STREAM.len(), 0..12)) {
            splits.push(STREAM.len());
            splits.sort_unstable();
            let mut framer = SseFramer::new(StreamEnd::Done);
            let mut out = Vec::new();
            let mut from = 0;
            for split in splits {
                let chunk = framer.push(Bytes::copy_from_slice(&STREAM.as_bytes()[from..split])).unwrap();
                prop_assert!(chunk.is_empty() || chunk.ends_with(b"\n\n") || chunk.ends_with(b"\n\r\n"));
                out.extend_from_slice(&chunk);
                from = split;
            }
            out.extend_from_slice(&framer.finish().unwrap());
            prop_assert_eq!(out, STREAM.as_bytes());
            prop_assert_eq!(framer.last_payload(), b"{\"usage\":{}}");
        }

        #[test]
        fn never_panics(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6)) {
            let mut framer = SseFramer::new(StreamEnd::Done);
            for chunk in chunks {
                let _unused = framer.push(Bytes::from(chunk));
            }
            let _unused = framer.finish();
        }
    }

    /// However small the chunks of a long event are, each byte is processed a bounded number of times.
    #[test]
    fn work_is_linear_in_the_input() {
        let event = format!("data: {{\"content\":\"{}\"}}\n\n", "a line\\n".repeat(1 << 16));
        for size in [1, 7, 512, 1 << 14] {
            let mut framer = SseFramer::new(StreamEnd::Done);
            let mut out = 0;
            for chunk in event.as_bytes().repeat(2).chunks(size) {
                out += framer.push(Bytes::copy_from_slice(chunk)).unwrap().len();
            }
            assert_eq!(out, 2 * event.len());
            assert!(
                framer.processed <= 5 * out,
                "{} bytes of work for {out} in pieces of {size}",
                framer.processed
            );
        }
    }

    #[test]
    fn an_endless_event_is_rejected() {
        let mut framer = SseFramer::new(StreamEnd::Done);
        let chunk = Bytes::from(vec![b'a'; 1 << 20]);
        for _ in 0..4 {
            assert_eq!(framer.push(chunk.clone()).unwrap(), "");
        }
        assert!(matches!(framer.push(chunk), Err(SseError::Malformed(_))));
    }

    #[test]
    fn error_events_are_detected_at_any_position() {
        for event in [
            r#"{"error":{}}"#,
            r#"{ "error" : "x" }"#,
            r#"{"object":"error","id":"a","error":{"message":"m","code":500}}"#,
            r#"{"id":"x","choices":[],"error":{"message":"m"}}"#,
            r#"{"object":"error","message":"m","type":"BadRequest","param":null,"code":400}"#,
            r#"{"object":7,"error":{}}"#,
            r#"{"error":null,"error":{}}"#,
            r#"{"error":{},"error":{}}"#,
            r#"{"object":"chunk","object":"error"}"#,
            r#"{"type":"error","code":"server_error","message":"m"}"#,
        ] {
            let pushed = SseFramer::new(StreamEnd::Done).push(Bytes::from(format!("data: {event}\n\n")));
            assert!(matches!(pushed, Err(SseError::EngineError(_))), "{event}: {pushed:?}");
        }
        for event in [
            r#"{"error":null,"choices":[]}"#,
            r#"{"choices":[{"delta":{"content":"\"error\": {"}}]}"#,
            r#"{"choices":[{"logprobs":{"token":"error"}}]}"#,
            r#"{"choices":[{"error":{}}],"object":"chat.completion.chunk"}"#,
        ] {
            assert!(
                SseFramer::new(StreamEnd::Done).push(Bytes::from(format!("data: {event}\n\n"))).is_ok(),
                "{event}"
            );
        }
    }

    fn push(text: &'static str) -> Result<Bytes, SseError> {
        SseFramer::new(StreamEnd::Done).push(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn whole_events_are_not_copied() {
        let chunk = Bytes::from_static(b"data: {}\n\n");
        let out = SseFramer::new(StreamEnd::Done).push(chunk.clone()).unwrap();
        assert_eq!(out.as_ptr(), chunk.as_ptr());
    }

    #[test]
    fn an_incomplete_event_is_buffered() {
        assert_eq!(push("data: {\"a\":1}\n\ndata: {\"b").unwrap(), "data: {\"a\":1}\n\n");
    }

    #[test]
    fn errors_are_distinguished() {
        assert!(matches!(push("<html>\n\n"), Err(SseError::Malformed(_))));
        assert!(matches!(push("data: hello\n\n"), Err(SseError::Malformed(_))));
        assert!(matches!(push("data: {\"error\":{}}\n\n"), Err(SseError::EngineError(_))));
        let mut framer = SseFramer::new(StreamEnd::Done);
        framer.push(Bytes::from_static(b"data: {}\n\n")).unwrap();
        assert!(matches!(framer.finish(), Err(SseError::Malformed(_))));
        let mut framer = SseFramer::new(StreamEnd::Body);
        framer.push(Bytes::from_static(b"data: {}\n\n")).unwrap();
        assert_eq!(framer.finish(), Ok(Bytes::new()));
    }

    #[test]
    fn a_last_event_without_blank_line_is_passed_on() {
        let mut framer = SseFramer::new(StreamEnd::Done);
        assert_eq!(framer.push(Bytes::from_static(b"data: [DONE]\n")).unwrap(), "");
        assert_eq!(framer.finish().unwrap(), "data: [DONE]\n");
    }

    const MESSAGES: StreamEnd = StreamEnd::EventType(&["message_stop"]);

    #[test]
    fn streams_with_typed_events_end_with_the_last_type() {
        let start = Bytes::from_static(b"event: message_start\ndata: {\"type\":\"message_start\"}\n\n");
        let unnamed = Bytes::from_static(b"data: {\"index\":0,\"type\":\"content_block_delta\"}\n\n");
        let stop = Bytes::from_static(b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
        let mut framer = SseFramer::new(MESSAGES);
        framer.push(start).unwrap();
        assert!(framer.is_in_preamble());
        framer.push(unnamed.clone()).unwrap();
        assert!(!framer.is_in_preamble());
        assert_eq!(framer.events(), 1);
        assert!(matches!(framer.finish(), Err(SseError::Malformed(_))));
        framer.push(stop).unwrap();
        assert_eq!(framer.finish(), Ok(Bytes::new()));

        let mut framer = SseFramer::new(MESSAGES);
        framer.push(unnamed).unwrap();
        framer.push(Bytes::from_static(b"data: {\"type\":\"message_stop\"}\n\n")).unwrap();
        assert_eq!(framer.finish(), Ok(Bytes::new()), "without names");
    }

    #[test]
    fn another_apis_end_does_not_count() {
        let mut framer = SseFramer::new(MESSAGES);
        framer.push(Bytes::from_static(b"data: {\"type\":\"x\"}\n\ndata: [DONE]\n\n")).unwrap();
        assert!(matches!(framer.finish(), Err(SseError::Malformed(_))));
        let mut framer = SseFramer::new(StreamEnd::Done);
        framer
            .push(Bytes::from_static(b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"))
            .unwrap();
        assert!(framer.finish().is_err() && !framer.is_in_preamble());
    }
}
