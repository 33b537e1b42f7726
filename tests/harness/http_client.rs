//! The HTTP client of tests.

use std::time::Duration;

/// Longer than every successful request takes on a busy machine.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A client that ignores the machine's proxy settings.
pub(crate) fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().timeout(REQUEST_TIMEOUT).build().unwrap()
}
