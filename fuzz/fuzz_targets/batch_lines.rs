//! The input of a batch is scanned identically whole and in parts, and an accepted line is JSON with the same members.
//!
//! The first byte is the size of the parts.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_batch::{BatchEndpoint, InputScanner, parse_line};
use serde_json::Value;

const MAX_LINE_BYTES: usize = 1000;

fuzz_target!(|input: &[u8]| {
    let Some((&part, input)) = input.split_first() else { return };
    let scan = |part: usize| {
        let mut scanner = InputScanner::new(BatchEndpoint::Completions, MAX_LINE_BYTES);
        input.chunks(part).for_each(|part| scanner.push(part));
        scanner.problems()
    };
    assert_eq!(scan(usize::from(part).max(1)), scan(usize::MAX));
    for line in input.split(|byte| *byte == b'\n') {
        let Ok(parsed) = parse_line(line, BatchEndpoint::Completions) else { continue };
        // A value has limits that a text has not, such as the size of numbers.
        let Ok(value) = serde_json::from_slice::<Value>(line) else { continue };
        assert_eq!(value["custom_id"], Value::from(parsed.custom_id.as_ref()));
        assert_eq!(value["method"], "POST");
        assert_eq!(value["url"], "/v1/completions");
        assert_eq!(value["body"], serde_json::from_str::<Value>(parsed.body).expect("a body is JSON"));
    }
});
