//! Rendered objects compared with upstream's, with the documentation's, and by a real API server.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod engine_sidecar;
mod examples;
mod recorded;
mod roles;
