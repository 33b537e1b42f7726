//! Waiting for the state of another process.

use std::time::Duration;

use tokio::time::Instant;

/// Longer than every start and every successful operation takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_millis(20);

/// Evaluates `condition` repeatedly until it holds; fails the test after [`LIMIT`].
pub(crate) async fn poll_until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        tokio::time::sleep(INTERVAL).await;
    }
}
