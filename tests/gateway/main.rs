//! End-to-end tests of the gateway, its tools and its sidecar with simulated engines.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod agents;
mod api;
mod bad_input;
mod batches;
mod console;
mod doctor;
mod drain;
mod explain;
mod faults;
mod fidelity;
#[path = "../harness"]
mod harness {
    pub(crate) mod client_api;
    pub(crate) mod commands;
    pub(crate) mod fleet;
    pub(crate) mod gateway;
    mod http_client;
    pub(crate) mod metrics;
    mod openai_error;
    pub(crate) mod process;
    pub(crate) mod raw_http;
    pub(crate) mod scripted;
    pub(crate) mod tls;
    mod waiting;
    pub(crate) mod wire_json;

    pub(crate) use http_client::client;
    pub(crate) use openai_error::openai_error;
    pub(crate) use waiting::{TEST_TIMEOUT, wait_until};
}
mod live_ranking;
mod local_prefill;
mod lora_adapters;
mod model_aliases;
mod other_paths;
mod overload;
mod prediction;
mod ranks;
mod registration;
mod replay;
mod sdk;
mod security;
mod shared_queue;
mod sidecar;
mod tls;
mod traces;
mod up;
mod version_pairs;
mod wire;
