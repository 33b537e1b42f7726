//! The clients against scripted servers, and against Mooncake's own masters and store nodes.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod admin;
mod rpc;
mod store;
