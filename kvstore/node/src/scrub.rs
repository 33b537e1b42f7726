//! Re-reads memory in the background at a fixed rate to detect corruption.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moongate_runtime::Supervisor;

use crate::segment_pool::{SegmentPool, SegmentScrubResult};

/// Time between two scrub steps of a segment.
const PERIOD: Duration = Duration::from_secs(1);

/// Counters of bytes read and of ranges that failed their checksum.
#[derive(Debug, Default)]
pub(crate) struct ScrubCounts {
    pub(crate) bytes: AtomicU64,
    pub(crate) damaged: AtomicU64,
}

/// Re-reads `rate` bytes per second of each segment until the supervisor shuts down. 0 turns scrubbing off.
pub(crate) fn start(pool: Arc<SegmentPool>, counts: Arc<ScrubCounts>, rate: u64, supervisor: &Supervisor) {
    if rate == 0 {
        return;
    }
    let stop = supervisor.token();
    supervisor.spawn_essential("store-scrub", async move {
        let scrubbing = async {
            loop {
                tokio::time::sleep(PERIOD).await;
                for segment in pool.segments().iter() {
                    let segment = Arc::clone(segment);
                    let result = tokio::task::spawn_blocking(move || segment.scrub(rate)).await;
                    let SegmentScrubResult { bytes, damaged } = result.unwrap_or_default();
                    counts.bytes.fetch_add(bytes, Ordering::Relaxed);
                    counts.damaged.fetch_add(damaged, Ordering::Relaxed);
                }
            }
        };
        stop.run_until_cancelled(scrubbing).await;
    });
}
