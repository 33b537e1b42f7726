//! Hashes compared with those of engines, and of chains in several parts.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod media;
mod recorded_events;
mod resume;
mod vectors;
