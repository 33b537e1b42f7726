//! A master over its ports, with Mooncake's own programs, and its parts under simulated faults.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod blocked_commit;
mod call_compatibility;
mod calls;
mod durable;
mod frames;
mod ha_simulation;
mod http_compatibility;
mod lease;
#[allow(dead_code, reason = "tests of `moongate-oplog` use the rest of it")]
#[path = "../../../oplog/tests/memory_disk/mod.rs"]
mod memory_disk;
mod mooncake_clients;
#[path = "../../../master-client/tests/integration/mooncake_harness.rs"]
mod mooncake_harness;
mod scenario;
mod test_master;
