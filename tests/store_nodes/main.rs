//! Store nodes beside the real things: Mooncake's client, its master, its store nodes; and our own client and master.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod disk;
mod drain;
mod masters;
mod node;
mod older_releases;
mod persistence;
mod rest;
mod tasks;
#[path = "../../kvstore/master/tests/test_master/mod.rs"]
mod test_master;
#[path = "../../kvstore/master-client/tests/store/harness.rs"]
mod world;
