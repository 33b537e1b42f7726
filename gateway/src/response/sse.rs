//! Checks server-sent events on their way through, without copying those that arrive whole.

use std::fmt;
use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// Longest event that is buffered: a chunk with many logprobs is tens of kilobytes.
const MAX_EVENT_BYTES: usize = 4 << 20;

/// Passes complete events on and buffers an incomplete one until its end arrives.
#[derive(Debug, Default)]
pub struct SseFramer {
    /// Start of an incomplete event. It contains no event end, so it is not searched again.
    partial: BytesMut,
    /// Payload of the last `data:` line that was JSON.
    last_payload: Bytes,
    /// Payload of the one before.
    previous_payload: Bytes,
    events: u64,
    done: bool,
    /// Bytes searched, checked or copied so far, for the test that the work is linear in the input.
    #[cfg(test)]
    processed: usize,
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
    pub fn finish(&mut self, expects_done: bool) -> Result<Bytes, SseError> {
        let rest = self.partial.split().freeze();
        self.check(&rest)?;
        if expects_done && !self.done {
            return Err(SseError::Malformed("ended its stream without `data: [DONE]`"));
        }
        Ok(rest)
    }

    /// JSON payload of the last event, which carries usage.
    #[must_use]
    pub fn last_payload(&self) -> &Bytes {
        &self.last_payload
    }

    /// JSON payload of the event before the last: if usage has its own event, this one carries the finish reason.
    #[must_use]
    pub fn previous_payload(&self) -> &Bytes {
        &self.previous_payload
    }

    /// Number of events, without `[DONE]`.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
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
                self.check_payload(events.slice(start..from + line.len()))?;
            } else if !is_field(line) {
                return Err(SseError::Malformed("sent data that is not a server-sent event"));
            }
            from = to + 1;
        }
        Ok(())
    }

    fn check_payload(&mut self, payload: Bytes) -> Result<(), SseError> {
        if reports_error(&payload) {
            return Err(SseError::EngineError(payload));
        }
        if payload.trim_ascii_end() == b"[DONE]" {
            self.done = true;
        } else if payload.starts_with(b"{") && payload.trim_ascii_end().ends_with(b"}") {
            self.previous_payload = std::mem::replace(&mut self.last_payload, payload);
            self.events += 1;
        } else {
            return Err(SseError::Malformed("sent an event that is not JSON"));
        }
        Ok(())
    }
}

/// Lines of the event-stream format other than `data:`.
fn is_field(line: &[u8]) -> bool {
    line.is_empty() || [&b":"[..], b"event:", b"id:", b"retry:"].iter().any(|field| line.starts_with(field))
}

/// Whether an event's JSON is an error: an object with an `error` member at any position, or with `"object":"error"`. Both contain
/// the quoted word, so that most events are only searched for it; inside a generated text the quotes are escaped.
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
                        EventMember::Object => members.next_value::<&RawValue>()?.get() == "\"error\"",
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
            let mut framer = SseFramer::default();
            let mut out = Vec::new();
            let mut from = 0;
            for split in splits {
                let chunk = framer.push(Bytes::copy_from_slice(&STREAM.as_bytes()[from..split])).unwrap();
                prop_assert!(chunk.is_empty() || chunk.ends_with(b"\n\n") || chunk.ends_with(b"\n\r\n"));
                out.extend_from_slice(&chunk);
                from = split;
            }
            out.extend_from_slice(&framer.finish(true).unwrap());
            prop_assert_eq!(out, STREAM.as_bytes());
            prop_assert_eq!(&framer.last_payload()[..], b"{\"usage\":{}}");
        }

        #[test]
        fn never_panics(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6)) {
            let mut framer = SseFramer::default();
            for chunk in chunks {
                let _unused = framer.push(Bytes::from(chunk));
            }
            let _unused = framer.finish(true);
        }
    }

    /// However small the chunks of a long event are, each byte is processed a bounded number of times.
    #[test]
    fn work_is_linear_in_the_input() {
        let event = format!("data: {{\"content\":\"{}\"}}\n\n", "a line\\n".repeat(1 << 16));
        for size in [1, 7, 512, 1 << 14] {
            let mut framer = SseFramer::default();
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
        let mut framer = SseFramer::default();
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
        ] {
            let pushed = SseFramer::default().push(Bytes::from(format!("data: {event}\n\n")));
            assert!(matches!(pushed, Err(SseError::EngineError(_))), "{event}: {pushed:?}");
        }
        for event in [
            r#"{"error":null,"choices":[]}"#,
            r#"{"choices":[{"delta":{"content":"\"error\": {"}}]}"#,
            r#"{"choices":[{"logprobs":{"token":"error"}}]}"#,
            r#"{"choices":[{"error":{}}],"object":"chat.completion.chunk"}"#,
        ] {
            assert!(SseFramer::default().push(Bytes::from(format!("data: {event}\n\n"))).is_ok(), "{event}");
        }
    }

    fn push(text: &'static str) -> Result<Bytes, SseError> {
        SseFramer::default().push(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn whole_events_are_not_copied() {
        let chunk = Bytes::from_static(b"data: {}\n\n");
        let out = SseFramer::default().push(chunk.clone()).unwrap();
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
        let mut framer = SseFramer::default();
        framer.push(Bytes::from_static(b"data: {}\n\n")).unwrap();
        assert!(matches!(framer.finish(true), Err(SseError::Malformed(_))));
        assert_eq!(framer.finish(false), Ok(Bytes::new()));
    }

    #[test]
    fn a_last_event_without_blank_line_is_passed_on() {
        let mut framer = SseFramer::default();
        assert_eq!(framer.push(Bytes::from_static(b"data: [DONE]\n")).unwrap(), "");
        assert_eq!(framer.finish(true).unwrap(), "data: [DONE]\n");
    }
}
