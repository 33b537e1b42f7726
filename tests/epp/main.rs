//! End-to-end tests of the endpoint picker behind Envoy, with simulated engines. The first run installs Envoy (37 MB).
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "../harness"]
mod harness {
    mod http_client;
    #[expect(dead_code, reason = "only the tests of the gateway start a gateway in another process")]
    pub(crate) mod process;
    mod waiting;

    pub(crate) use http_client::client;
    pub(crate) use waiting::{TEST_TIMEOUT, wait_until};
}
mod picking;
mod proxy;
