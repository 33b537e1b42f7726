//! The server of a Mooncake-compatible master.
