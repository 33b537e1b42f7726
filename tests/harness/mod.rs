//! What the end-to-end tests stand on: fleets of simulated engines, the gateway in this process, the binary as a
//! child process, and engines that answer by script.
//!
//! Nothing here sleeps for a fixed time: it waits for an event, or polls until a deadline.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

pub(crate) mod collector;
pub(crate) mod fleet;
pub(crate) mod gateway;
pub(crate) mod process;
pub(crate) mod raw_http;
pub(crate) mod scripted;
pub(crate) mod store_prompts;
pub(crate) mod tls;
pub(crate) mod wire_json;

use std::time::Duration;

use serde_json::Value;

/// Longer than anything that works takes, on a machine that is busy with other things too.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits until `condition` holds; fails the test after [`TEST_TIMEOUT`].
pub(crate) async fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "not within {TEST_TIMEOUT:?}: {what}");
}

/// A client that uses no proxy of the machine.
pub(crate) fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().timeout(TEST_TIMEOUT * 3).build().unwrap()
}

/// Checks that `body` is an error as OpenAI's clients read it, and returns its `error` member.
pub(crate) fn openai_error(body: &[u8]) -> Value {
    let shown = String::from_utf8_lossy(body);
    let body: Value = serde_json::from_slice(body).unwrap_or_else(|error| panic!("{error}: {shown:?}"));
    let error = body["error"].clone();
    for member in ["message", "type", "code"] {
        assert!(error[member].is_string(), "error.{member} is no string: {shown}");
    }
    assert!(error["param"].is_string() || error["param"].is_null(), "error.param: {shown}");
    assert!(error.get("param").is_some(), "error.param is missing: {shown}");
    error
}
