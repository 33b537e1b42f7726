//! Tests of the whole translation.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod refused;
mod response;
mod stream;
mod vectors;
