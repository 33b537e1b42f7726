//! Supervised tasks with names.
//!
//! With a bare `tokio::spawn` nothing waits for the task, and its panic is lost with the handle. Every task of the programs is started here
//! instead, so that a shutdown can wait for it and report by name which one did not end.
//!
//! A panic is a defect. Its effect depends on the task:
//!
//! - [`Supervisor::spawn`]: a connection, a request, a job. The panic ends that task only.
//! - [`Supervisor::spawn_restarted`]: a loop without its own state, such as polling. It restarts after a pause.
//! - [`Supervisor::spawn_essential`] and [`Supervisor::wrap_essential_thread`]: the process cannot work without it. [`Supervisor::failed`]
//!   resolves, and the process exits with an error, so that its service manager restarts it.

#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use moongate_backoff::{Backoff, BackoffPolicy};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long [`Supervisor::shutdown`] waits for tasks to be dropped once it has aborted them.
const ABORT_GRACE: Duration = Duration::from_millis(250);
/// Pauses before a panicked task restarts.
const RESTART_BACKOFF: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(500), max: Duration::from_secs(30) };
/// After running this long, a task that panics restarts with the initial pause again.
const STABLE_AFTER: Duration = Duration::from_secs(60);

/// Panics of all supervisors in the process.
static TASK_PANICS: AtomicU64 = AtomicU64::new(0);

/// Number of supervised tasks in this process that panicked.
#[must_use]
pub fn task_panics() -> u64 {
    TASK_PANICS.load(Ordering::Relaxed)
}

/// Starts, counts and ends tasks. Cloning is cheap; clones share the same tasks.
#[derive(Clone, Default)]
pub struct Supervisor {
    state: Arc<SupervisorState>,
}

#[derive(Default)]
struct SupervisorState {
    token: CancellationToken,
    tasks: Mutex<SupervisedTasks>,
    /// Notified whenever the last task ends.
    idle: Notify,
    panics: AtomicUsize,
    /// The first essential task that panicked.
    failed: watch::Sender<Option<&'static str>>,
}

impl SupervisorState {
    /// Counts and logs a panic of the task.
    fn record_panic(&self, name: &'static str, panic: &(dyn Any + Send), consequence: &'static str) {
        self.panics.fetch_add(1, Ordering::Relaxed);
        TASK_PANICS.fetch_add(1, Ordering::Relaxed);
        tracing::error!(task = name, panic_message = panic_message(panic), consequence, "task panicked");
    }

    fn fail(&self, name: &'static str) {
        self.failed.send_if_modified(|failed| {
            let is_first = failed.is_none();
            failed.get_or_insert(name);
            is_first
        });
    }
}

#[derive(Default)]
struct SupervisedTasks {
    running: HashMap<u64, SupervisedTask>,
    next_id: u64,
    /// Set when a shutdown has timed out: tasks started later are aborted at once.
    aborted: bool,
}

struct SupervisedTask {
    name: &'static str,
    /// `None` only between registration and the return of `tokio::spawn`.
    abort: Option<AbortHandle>,
}

/// The tasks that were still running at the deadline of [`Supervisor::shutdown`]. They were aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShutdownTimeoutError {
    /// How long the shutdown waited.
    pub waited: Duration,
    /// Number of aborted tasks by name.
    pub tasks: BTreeMap<&'static str, usize>,
}

impl fmt::Display for ShutdownTimeoutError {
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

impl std::error::Error for ShutdownTimeoutError {}

impl Supervisor {
    /// Creates a supervisor without tasks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A supervisor with its own tasks, token and shutdown. Only the failure of an essential task is shared with this one.
    #[must_use]
    pub fn child(&self) -> Self {
        let shared = SupervisorState { failed: self.state.failed.clone(), ..SupervisorState::default() };
        Self { state: Arc::new(shared) }
    }

    /// Starts `future` as a task called `name`: one unit of work, such as a connection or a request.
    ///
    /// The handle may be dropped: the task continues. The task should end soon after [`Supervisor::token`] is cancelled. A panic is logged
    /// with the task's name and counted in [`Supervisor::panics`]; the handle reports it too, and no other task is affected.
    ///
    /// Must be called inside a tokio runtime.
    pub fn spawn(
        &self,
        name: &'static str,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        self.spawn_monitored(name, false, future)
    }

    /// Starts a task without which the process cannot work: as [`Supervisor::spawn`], but after a panic [`Supervisor::failed`] resolves.
    pub fn spawn_essential(
        &self,
        name: &'static str,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        self.spawn_monitored(name, true, future)
    }

    /// Starts a task that is recreated after a panic, with a growing pause, until it ends by itself or a shutdown starts. State captured by
    /// `make` must stay consistent across a panic.
    pub fn spawn_restarted<F>(
        &self,
        name: &'static str,
        mut make: impl FnMut() -> F + Send + 'static,
    ) -> JoinHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.spawn_registered(name, move |registration| async move {
            let shared = &registration.state;
            let mut backoff = Backoff::new(RESTART_BACKOFF);
            loop {
                let started = Instant::now();
                let Err(panic) = AssertUnwindSafe(async { make().await }).catch_unwind().await else {
                    return;
                };
                shared.record_panic(name, panic.as_ref(), "the task restarts");
                if started.elapsed() >= STABLE_AFTER {
                    backoff.reset();
                }
                backoff.record_failure();
                if shared.token.run_until_cancelled(tokio::time::sleep(backoff.pause())).await.is_none() {
                    return;
                }
            }
        })
    }

    /// Wraps the body of a thread without which the process cannot work: after a panic in it [`Supervisor::failed`] resolves.
    pub fn wrap_essential_thread<T>(
        &self,
        name: &'static str,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> impl FnOnce() -> T + Send + 'static {
        let shared = Arc::clone(&self.state);
        move || match catch_unwind(AssertUnwindSafe(body)) {
            Ok(result) => result,
            Err(panic) => {
                shared.record_panic(name, panic.as_ref(), "the process ends");
                shared.fail(name);
                resume_unwind(panic)
            }
        }
    }

    /// Resolves with the name of the first essential task or thread that panicked.
    pub async fn failed(&self) -> &'static str {
        let mut failed = self.state.failed.subscribe();
        match failed.wait_for(Option::is_some).await.map(|name| *name) {
            Ok(Some(name)) => name,
            // The sender lives as long as this supervisor.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    /// Starts a task whose panic is recorded, and reported as a failure if the task is essential.
    fn spawn_monitored(
        &self,
        name: &'static str,
        is_essential: bool,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        // Not an async block: that would reserve space for the future twice, before and after its first poll.
        self.spawn_registered(name, move |registration| {
            AssertUnwindSafe(future).catch_unwind().map(move |outcome| {
                let shared = &registration.state;
                let Err(panic) = outcome else { return };
                let consequence = if is_essential { "the process ends" } else { "the task's work is lost" };
                shared.record_panic(name, panic.as_ref(), consequence);
                if is_essential {
                    shared.fail(name);
                }
                resume_unwind(panic);
            })
        })
    }

    /// Starts the future returned by `make`. The future owns the registration, so the entry is removed when the task ends, is aborted, or
    /// is never polled.
    fn spawn_registered<F>(
        &self,
        name: &'static str,
        make: impl FnOnce(TaskRegistration) -> F,
    ) -> JoinHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let registration = TaskRegistration::new(Arc::clone(&self.state), name);
        let id = registration.id;
        let task = make(registration);
        #[expect(clippy::disallowed_methods, reason = "the one place that starts tasks")]
        let handle = tokio::spawn(task);
        // The lock is not held across the spawn: a runtime that is shutting down drops the task inside it, and the dropped registration
        // takes this lock.
        let is_aborted = {
            let mut tasks = self.state.tasks.lock();
            if let Some(task) = tasks.running.get_mut(&id) {
                task.abort = Some(handle.abort_handle());
            }
            tasks.aborted
        };
        if is_aborted {
            handle.abort();
        }
        handle
    }

    /// Cancelled when the shutdown starts. Cancelling it stops every task of the supervisor; use a `child_token()` for a smaller scope.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.state.token.clone()
    }

    #[must_use]
    pub fn running_tasks(&self) -> usize {
        self.state.tasks.lock().running.len()
    }

    /// Number of tasks that panicked.
    #[must_use]
    pub fn panics(&self) -> usize {
        self.state.panics.load(Ordering::Relaxed)
    }

    /// Cancels the token and waits until every task has ended.
    ///
    /// Must not be awaited inside a task of this supervisor, which would wait for itself.
    ///
    /// # Errors
    /// When tasks are still running at the deadline. They are named in the error and aborted.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), ShutdownTimeoutError> {
        self.state.token.cancel();
        if tokio::time::timeout(deadline, self.wait_idle()).await.is_ok() {
            return Ok(());
        }
        let aborted = self.abort_all();
        if aborted.is_empty() {
            return Ok(());
        }
        // An aborted task is dropped later, by its worker thread.
        let _ = tokio::time::timeout(ABORT_GRACE, self.wait_idle()).await;
        Err(ShutdownTimeoutError { waited: deadline, tasks: aborted })
    }

    /// Resolves when no task is running.
    async fn wait_idle(&self) {
        loop {
            let mut notified = std::pin::pin!(self.state.idle.notified());
            // Registered before the count is read, so that an end in between is not missed.
            notified.as_mut().enable();
            if self.running_tasks() == 0 {
                return;
            }
            notified.await;
        }
    }

    fn abort_all(&self) -> BTreeMap<&'static str, usize> {
        let mut names = BTreeMap::new();
        let mut handles = Vec::new();
        {
            let mut tasks = self.state.tasks.lock();
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
            .field("running", &self.running_tasks())
            .field("panics", &self.panics())
            .field("shutting_down", &self.state.token.is_cancelled())
            .finish()
    }
}

/// Registration of one task, removed on drop.
struct TaskRegistration {
    state: Arc<SupervisorState>,
    id: u64,
}

impl TaskRegistration {
    fn new(state: Arc<SupervisorState>, name: &'static str) -> Self {
        let mut tasks = state.tasks.lock();
        let id = tasks.next_id;
        tasks.next_id += 1;
        tasks.running.insert(id, SupervisedTask { name, abort: None });
        drop(tasks);
        Self { state, id }
    }
}

impl Drop for TaskRegistration {
    fn drop(&mut self) {
        let mut tasks = self.state.tasks.lock();
        let ended = tasks.running.remove(&self.id);
        let none_left = tasks.running.is_empty();
        drop(tasks);
        drop(ended);
        if none_left {
            self.state.idle.notify_waiters();
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(panic value is not text)")
}
