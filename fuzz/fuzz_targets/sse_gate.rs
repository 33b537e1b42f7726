//! The gateway forwards an engine's stream event by event. For any chunking of the stream, the same bytes are forwarded and the stream ends
//! in the same way, and no event in which `serde_json` finds an error is forwarded.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use moongate_gateway::{SseError, SseFramer, StreamEnd};
use serde_json::{Map, Value};

/// The forwarded bytes, and the end of the stream: its last two payloads or a fault.
type SseRelayResult = (Vec<u8>, Result<[Bytes; 2], SseError>);

fn relay(stream: &[u8], piece: usize, end: StreamEnd) -> SseRelayResult {
    let mut gate = SseFramer::new(end);
    let mut out = Vec::new();
    for piece in stream.chunks(piece) {
        match gate.push(Bytes::copy_from_slice(piece)) {
            Ok(events) => out.extend_from_slice(&events),
            Err(fault) => return (out, Err(fault)),
        }
    }
    match gate.finish() {
        Ok(rest) => out.extend_from_slice(&rest),
        Err(fault) => return (out, Err(fault)),
    }
    (out, Ok([gate.previous_payload(), gate.last_payload()].map(Bytes::copy_from_slice)))
}

fn reports_error(payload: &[u8]) -> bool {
    // A generated text has no other escapes in its members' names.
    let event = serde_json::from_slice::<Map<String, Value>>(payload).unwrap_or_default();
    let is_error = event.get("error").is_some_and(|error| !error.is_null());
    let is_marked =
        ["object", "type"].iter().any(|name| event.get(*name).is_some_and(|kind| kind == "error"));
    (is_error || is_marked) && !payload.contains(&b'\\')
}

// The first byte is the length of a piece, and how the stream has to end.
fuzz_target!(|input: &[u8]| {
    let Some((first, stream)) = input.split_first() else { return };
    let piece = usize::from(first / 2).max(1);
    let end = match (first & 1, first & 2) {
        (1, _) => StreamEnd::Done,
        (_, 2) => StreamEnd::EventType(&["message_stop"]),
        _ => StreamEnd::Body,
    };
    let whole = relay(stream, stream.len().max(1), end);
    let cut = relay(stream, piece, end);
    assert_eq!(cut.1, whole.1);
    assert!(stream.starts_with(&cut.0) && stream.starts_with(&whole.0));
    if whole.1.is_ok() {
        assert_eq!((cut.0.len(), whole.0.len()), (stream.len(), stream.len()));
    }
    for line in cut.0.split(|byte| *byte == b'\n') {
        let payload = line.strip_prefix(b"data:").unwrap_or_default();
        assert!(!reports_error(payload), "an error was passed on: {:?}", String::from_utf8_lossy(payload));
    }
});
