//! Masters of one store behind a router.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod calls;
mod kills;
mod scenario;
