//! Formats compared with recordings and vectors of the real programs, and malformed input.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod admin;
mod frames;
mod golden;
mod keys;
mod kv_events;

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|start| u8::from_str_radix(&text[start..start + 2], 16).unwrap()).collect()
}
