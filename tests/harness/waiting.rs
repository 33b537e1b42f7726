//! Waiting for a condition: a test polls until a deadline, and never sleeps for a fixed time.

use std::time::Duration;

/// Longer than every successful operation takes on a busy machine.
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
