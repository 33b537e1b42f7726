//! Tasks with a name and an owner.
//!
//! A bare `tokio::spawn` can be forgotten: nothing waits for it, and its panic disappears with its handle.
//! Every task of the gateway is started here instead, so that a shutdown can wait for it and say by name
//! which one did not end.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinHandle};
use tokio_util::sync::CancellationToken;

/// How long [`Supervisor::shutdown`] waits for tasks to be dropped once it has aborted them.
const ABORT_GRACE: Duration = Duration::from_millis(250);

/// Starts tasks, counts them, and ends them. Cloning is cheap and every clone is the same supervisor.
#[derive(Clone, Default)]
pub struct Supervisor {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    token: CancellationToken,
    tasks: Mutex<Tasks>,
    /// Told whenever the last task ends.
    idle: Notify,
    panics: AtomicUsize,
}

#[derive(Default)]
struct Tasks {
    running: HashMap<u64, Task>,
    next_id: u64,
    /// Set when a shutdown has run out of time: a task started after that is aborted at once.
    aborted: bool,
}

struct Task {
    name: &'static str,
    /// Missing only between the entry and the return of `tokio::spawn`.
    abort: Option<AbortHandle>,
}

/// The tasks that had not ended at the deadline of [`Supervisor::shutdown`]. They have been aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StillRunning {
    /// How long the shutdown waited.
    pub waited: Duration,
    /// Number of tasks by name.
    pub tasks: BTreeMap<&'static str, usize>,
}

impl fmt::Display for StillRunning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total: usize = self.tasks.values().sum();
        write!(f, "{total} task(s) did not end within {:?} and were aborted:", self.waited)?;
        for (position, (name, count)) in self.tasks.iter().enumerate() {
            let separator = if position == 0 { "" } else { "," };
            write!(f, "{separator} {name}")?;
            if *count > 1 {
                write!(f, " ({count}×)")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for StillRunning {}

impl Supervisor {
    /// A supervisor with no tasks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts `future` as a task called `name`.
    ///
    /// The handle may be dropped: the task goes on. The task is expected to end soon after
    /// [`Supervisor::token`] is cancelled. If it panics, the panic is logged with the name and counted in
    /// [`Supervisor::panics`]; whoever awaits the handle sees it too.
    ///
    /// Must be called inside a tokio runtime.
    pub fn spawn(
        &self,
        name: &'static str,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        let registration = Registration::new(Arc::clone(&self.shared), name);
        let id = registration.id;
        let task = async move {
            // Moved in, so that the entry goes when the task ends, is aborted, or is never polled.
            let registration = registration;
            if let Err(panic) = AssertUnwindSafe(future).catch_unwind().await {
                registration.shared.panics.fetch_add(1, Ordering::Relaxed);
                tracing::error!(
                    task = name,
                    message_of_panic = panic_message(panic.as_ref()),
                    "task panicked"
                );
                resume_unwind(panic);
            }
        };
        #[expect(clippy::disallowed_methods, reason = "the one place that starts tasks")]
        let handle = tokio::spawn(task);
        // The lock is not held across the spawn: a runtime that is shutting down drops the task inside it,
        // and the dropped registration takes this lock.
        let too_late = {
            let mut tasks = self.shared.tasks.lock();
            if let Some(task) = tasks.running.get_mut(&id) {
                task.abort = Some(handle.abort_handle());
            }
            tasks.aborted
        };
        if too_late {
            handle.abort();
        }
        handle
    }

    /// Cancelled when the shutdown begins. Cancelling it stops every task of the supervisor, so a task that
    /// wants a scope of its own takes a `child_token()`.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.shared.token.clone()
    }

    /// Number of tasks that have been started and have not ended.
    #[must_use]
    pub fn alive(&self) -> usize {
        self.shared.tasks.lock().running.len()
    }

    /// Number of tasks that ended by a panic.
    #[must_use]
    pub fn panics(&self) -> usize {
        self.shared.panics.load(Ordering::Relaxed)
    }

    /// Cancels the token and waits until every task has ended.
    ///
    /// Not to be awaited inside a task of this supervisor, which would wait for itself.
    ///
    /// # Errors
    /// When `deadline` has passed and tasks are left. They are named in the error and aborted.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), StillRunning> {
        self.shared.token.cancel();
        if tokio::time::timeout(deadline, self.idle()).await.is_ok() {
            return Ok(());
        }
        let left = self.abort_all();
        if left.is_empty() {
            return Ok(());
        }
        // A task is dropped by its worker thread, not by the call to abort.
        let _ = tokio::time::timeout(ABORT_GRACE, self.idle()).await;
        Err(StillRunning { waited: deadline, tasks: left })
    }

    /// Resolves when no task runs.
    async fn idle(&self) {
        loop {
            let mut told = std::pin::pin!(self.shared.idle.notified());
            // Enlisted before the count is read, so that an end in between is not missed.
            told.as_mut().enable();
            if self.alive() == 0 {
                return;
            }
            told.await;
        }
    }

    fn abort_all(&self) -> BTreeMap<&'static str, usize> {
        let mut names = BTreeMap::new();
        let mut handles = Vec::new();
        {
            let mut tasks = self.shared.tasks.lock();
            tasks.aborted = true;
            for task in tasks.running.values_mut() {
                *names.entry(task.name).or_insert(0) += 1;
                handles.extend(task.abort.take());
            }
        }
        // Outside the lock: aborting an idle task may drop it here, and its registration takes the lock.
        for handle in handles {
            handle.abort();
        }
        names
    }
}

impl fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor")
            .field("alive", &self.alive())
            .field("panics", &self.panics())
            .field("shutting_down", &self.shared.token.is_cancelled())
            .finish()
    }
}

/// The entry of one task; dropping it takes the entry out.
struct Registration {
    shared: Arc<Shared>,
    id: u64,
}

impl Registration {
    fn new(shared: Arc<Shared>, name: &'static str) -> Self {
        let mut tasks = shared.tasks.lock();
        let id = tasks.next_id;
        tasks.next_id += 1;
        tasks.running.insert(id, Task { name, abort: None });
        drop(tasks);
        Self { shared, id }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut tasks = self.shared.tasks.lock();
        let ended = tasks.running.remove(&self.id);
        let none_left = tasks.running.is_empty();
        drop(tasks);
        drop(ended);
        if none_left {
            self.shared.idle.notify_waiters();
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(a value that is not text)")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn shutdown_waits_for_tasks_that_watch_the_token() {
        let supervisor = Supervisor::new();
        for _ in 0..3 {
            let token = supervisor.token();
            supervisor.spawn("patient", async move { token.cancelled().await });
        }
        assert_eq!(supervisor.alive(), 3);
        supervisor.shutdown(LONG).await.unwrap();
        assert_eq!(supervisor.alive(), 0);
    }

    #[tokio::test]
    async fn shutdown_names_and_aborts_what_does_not_end() {
        struct Dropped(Arc<AtomicUsize>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let supervisor = Supervisor::new();
        let dropped = Arc::new(AtomicUsize::new(0));
        for _ in 0..2 {
            let held = Dropped(Arc::clone(&dropped));
            supervisor.spawn("deaf", async move {
                let _held = held;
                std::future::pending::<()>().await;
            });
        }
        let token = supervisor.token();
        supervisor.spawn("patient", async move { token.cancelled().await });

        let left = supervisor.shutdown(Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(left.tasks, BTreeMap::from([("deaf", 2)]));
        assert_eq!(left.to_string(), "2 task(s) did not end within 50ms and were aborted: deaf (2×)");
        assert_eq!(dropped.load(Ordering::SeqCst), 2);
        assert_eq!(supervisor.alive(), 0);

        let late = supervisor.spawn("late", std::future::pending());
        assert!(late.await.unwrap_err().is_cancelled());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_panic_is_counted_and_seen_by_the_handle() {
        let supervisor = Supervisor::new();
        let handle = supervisor.spawn("clumsy", async { panic!("dropped it") });
        assert!(handle.await.unwrap_err().is_panic());
        assert_eq!(supervisor.panics(), 1);
        assert_eq!(supervisor.alive(), 0);
        supervisor.shutdown(LONG).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn many_short_tasks_leave_nothing_behind() {
        let supervisor = Supervisor::new();
        for _ in 0..10_000 {
            supervisor.spawn("short", async {});
        }
        supervisor.shutdown(LONG).await.unwrap();
        assert_eq!(supervisor.alive(), 0);
    }

    #[test]
    fn a_runtime_that_ends_first_does_not_deadlock() {
        let supervisor = Supervisor::new();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let inner = supervisor.clone();
        runtime.block_on(async move {
            let again = inner.clone();
            inner.spawn("outer", async move {
                struct SpawnOnDrop(Supervisor);
                impl Drop for SpawnOnDrop {
                    fn drop(&mut self) {
                        self.0.spawn("after the end", async {});
                    }
                }
                let _guard = SpawnOnDrop(again);
                std::future::pending::<()>().await;
            });
            tokio::task::yield_now().await;
        });
        drop(runtime);
        assert_eq!(supervisor.alive(), 0);
    }
}
