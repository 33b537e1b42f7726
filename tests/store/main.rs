//! End-to-end tests of the store: masters, store nodes, clients and the gateway's index, mostly with Mooncake's own programs.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod authentication;
mod client_faults;
#[path = "../harness"]
mod harness {
    #[expect(
        dead_code,
        reason = "only the tests of the gateway use pairs of engines and other protocols than SGLang's"
    )]
    pub(crate) mod fleet;
    pub(crate) mod gateway;
    mod http_client;
    pub(crate) mod linearizability;
    pub(crate) mod metrics;
    pub(crate) mod polling;
    #[expect(
        dead_code,
        reason = "only the tests of the gateway send requests to a gateway in another process"
    )]
    pub(crate) mod process;
    pub(crate) mod store_prompts;
    mod waiting;

    pub(crate) use http_client::client;
    pub(crate) use waiting::{TEST_TIMEOUT, wait_until};
}
mod holder;
mod index;
mod kv;
mod large_list;
mod large_store;
mod master;
mod master_events;
mod master_restart;
mod matrix;
mod mooncake_events;
mod node_process;
mod nodes;
mod quotas;
mod return_hints;
mod shards;
mod shared_memory;
mod soak;
mod upgrade;
mod upgrade_hooks;
