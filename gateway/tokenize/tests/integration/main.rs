//! Token ids of requests, with a small model and with real ones.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod apis;
mod conversations;
mod exact;
mod media;
mod refusals;
