//! Looks for bits that have changed, a little at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moongate_runtime::Supervisor;

use crate::segment_pool::{SegmentPool, SegmentScrubResult};

/// Time between two looks.
const PERIOD: Duration = Duration::from_secs(1);

/// What has been found.
#[derive(Debug, Default)]
pub(crate) struct ScrubCounts {
    pub(crate) bytes: AtomicU64,
    pub(crate) damaged: AtomicU64,
}

/// Reads `rate` bytes per second of each segment again, until the supervisor shuts down.
pub(crate) fn start(pool: Arc<SegmentPool>, counts: Arc<ScrubCounts>, rate: u64, supervisor: &Supervisor) {
    if rate == 0 {
        return;
    }
    let stop = supervisor.token();
    supervisor.spawn_essential("store-scrub", async move {
        let look = async {
            loop {
                tokio::time::sleep(PERIOD).await;
                for lent in pool.segments().iter() {
                    let lent = Arc::clone(lent);
                    let found = tokio::task::spawn_blocking(move || lent.scrub(rate)).await;
                    let SegmentScrubResult { bytes, damaged } = found.unwrap_or_default();
                    counts.bytes.fetch_add(bytes, Ordering::Relaxed);
                    counts.damaged.fetch_add(damaged, Ordering::Relaxed);
                }
            }
        };
        stop.run_until_cancelled(look).await;
    });
}
