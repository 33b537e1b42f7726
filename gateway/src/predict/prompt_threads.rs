//! Threads that tokenize and hash prompts.
//!
//! The threads of connections do that only with short prompts: one of a megabyte takes ten milliseconds, in which no stream on its thread
//! would be relayed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::{DedicatedThread, Supervisor};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

/// How much earlier a prompt is read than one that is a byte longer and arrived at the same time: ten times what reading a byte takes, so
/// that short prompts do not wait for long ones, and long ones do not wait forever.
const AGEING_PER_BYTE: Duration = Duration::from_nanos(100);

/// Length of a prompt in bytes up to which reading it takes hardly longer than waking a thread: some 30 µs.
pub(super) const SHORT_PROMPT_BYTES: usize = 4 << 10;

/// The threads, and what they are to read.
#[derive(Debug, Clone)]
pub(crate) struct PromptThreads {
    queue: Arc<PromptQueue>,
    limit: Duration,
}

/// A prompt was not read: its time limit has passed, reading it panicked, or the gateway is shutting down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReadTooLate;

#[derive(Default)]
struct PromptQueue {
    jobs: Mutex<BinaryHeap<Reverse<QueuedJob>>>,
    added: Notify,
}

struct QueuedJob {
    due: Instant,
    bytes: usize,
    /// Reads the prompt, and returns what passes the result on.
    run: Box<dyn FnOnce() -> FinishedJob + Send>,
}

type FinishedJob = Box<dyn FnOnce() + Send>;

/// Reads a prompt on this thread, which must not be long.
pub(super) fn read_here<T>(read: impl FnOnce() -> T) -> Result<T, ReadTooLate> {
    catch_panic(read).ok_or(ReadTooLate)
}

fn catch_panic<T>(read: impl FnOnce() -> T) -> Option<T> {
    let result = catch_unwind(AssertUnwindSafe(read));
    if result.is_err() {
        tracing::error!("reading a prompt panicked; its request is routed without a prediction");
    }
    result.ok()
}

impl PromptThreads {
    /// Starts `threads`, which end with the supervisor. A prompt that is not read within `limit` is given up.
    ///
    /// # Errors
    /// A thread cannot be created.
    pub(crate) fn start(threads: usize, limit: Duration, supervisor: &Supervisor) -> io::Result<Self> {
        let queue = Arc::new(PromptQueue::default());
        for number in 0..threads.max(1) {
            let (queue, stop) = (queue.clone(), supervisor.token());
            let work = async move {
                let _stopped = stop.run_until_cancelled(queue.run_jobs()).await;
            };
            DedicatedThread::start(supervisor, "prompt thread", format!("prompt-{number}"), work)?;
        }
        Ok(Self { queue, limit })
    }

    /// Runs `read` for a prompt of `bytes` on one of the threads.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ReadTooLate> {
        let arrived = Instant::now();
        let (sender, result) = oneshot::channel();
        let run = move || -> FinishedJob {
            // What is late is not awaited any more.
            if sender.is_closed() {
                return Box::new(|| ());
            }
            let result = read();
            Box::new(move || drop(sender.send(result)))
        };
        let ageing = AGEING_PER_BYTE * u32::try_from(bytes).unwrap_or(u32::MAX);
        self.queue.jobs.lock().push(Reverse(QueuedJob { due: arrived + ageing, bytes, run: Box::new(run) }));
        // Other requests of this thread that are ready add theirs first.
        tokio::task::yield_now().await;
        self.queue.added.notify_one();
        match timeout_at(arrived + self.limit, result).await {
            Ok(Ok(read)) => Ok(read),
            // After a panic, or at shutdown.
            Ok(Err(_)) | Err(_) => Err(ReadTooLate),
        }
    }
}

impl PromptQueue {
    /// The next prompts to read, and whether there are more. Short ones are read one after the other before their requests go on.
    fn take_batch(&self, batch: &mut Vec<QueuedJob>) -> bool {
        let mut jobs = self.jobs.lock();
        let mut bytes: usize = 0;
        while let Some(Reverse(next)) = jobs.peek() {
            bytes = bytes.saturating_add(next.bytes);
            if bytes > SHORT_PROMPT_BYTES && !batch.is_empty() {
                break;
            }
            batch.extend(jobs.pop().map(|Reverse(job)| job));
        }
        !jobs.is_empty()
    }

    async fn run_jobs(&self) {
        let (mut batch, mut finished) = (Vec::new(), Vec::new());
        loop {
            let has_more = self.take_batch(&mut batch);
            if batch.is_empty() {
                self.added.notified().await;
                continue;
            }
            // Notifications of several prompts may be one.
            if has_more {
                self.added.notify_one();
            }
            for job in batch.drain(..) {
                finished.extend(catch_panic(job.run));
            }
            finished.drain(..).for_each(|pass_on: FinishedJob| pass_on());
        }
    }
}

impl std::fmt::Debug for PromptQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptQueue").field("jobs", &self.jobs.lock().len()).finish_non_exhaustive()
    }
}

impl PartialEq for QueuedJob {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}

impl Eq for QueuedJob {}

impl PartialOrd for QueuedJob {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for QueuedJob {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn threads(count: usize, limit: Duration) -> PromptThreads {
        PromptThreads::start(count, limit, &Supervisor::new()).unwrap()
    }

    #[tokio::test]
    async fn short_prompts_overtake_long_ones() {
        let threads = threads(1, Duration::from_secs(60));
        let (release, released) = mpsc::channel::<()>();
        let first = threads.run(1, move || released.recv());
        let (sender, order) = mpsc::channel();
        let later = [9 << 20, 1 << 20, 10].map(|bytes| {
            let (sender, threads) = (sender.clone(), threads.clone());
            async move { threads.run(bytes, move || sender.send(bytes)).await }
        });
        let all = async { tokio::join!(first, futures_util::future::join_all(later)) };
        let release = async {
            // All others are queued by now, since each future is polled once before this one.
            release.send(()).unwrap();
        };
        let (_, ()) = tokio::join!(all, release);
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [10, 1 << 20, 9 << 20]);
    }

    #[tokio::test]
    async fn late_prompts_are_given_up_and_panics_survived() {
        let threads = threads(1, Duration::from_millis(20));
        let (release, released) = mpsc::channel::<()>();
        assert_eq!(threads.run(1, move || released.recv().is_ok()).await, Err(ReadTooLate));
        let (sender, ran) = mpsc::channel();
        assert_eq!(threads.run(1, move || sender.send(())).await, Err(ReadTooLate));
        release.send(()).unwrap();
        let patient = PromptThreads { limit: Duration::from_secs(60), ..threads.clone() };
        assert_eq!(patient.run(1, || panic!("a panic on purpose")).await, Err::<(), _>(ReadTooLate));
        assert_eq!(patient.run(1, || 7).await, Ok(7));
        assert_eq!(
            (read_here(|| panic!("a panic on purpose")), read_here(|| 7)),
            (Err::<(), _>(ReadTooLate), Ok(7))
        );
        assert!(ran.recv().is_err(), "it was not read after its time limit");
    }
}
