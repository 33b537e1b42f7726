//! The sockets against libzmq and against raw bytes.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod libzmq;
mod sockets;
