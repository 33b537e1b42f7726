//! A master over its ports, with Mooncake's own programs, and its parts under simulated faults.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod blocked_commit;
mod call_compatibility;
mod calls;
mod durable;
mod frames;
mod ha_simulation;
mod http_compatibility;
mod lease;
mod mooncake_clients;
mod scenario;
