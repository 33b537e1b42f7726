//! Tasks with a name and an owner.
//!
//! A bare `tokio::spawn` can be forgotten: nothing waits for it, and its panic disappears with its handle.
//! Every task of the gateway is started here instead, so that a shutdown can wait for it and say by name
//! which one did not end.
//!
//! A panic is a defect. What it ends depends on the task:
//!
//! - [`Supervisor::spawn`]: a connection, a request, a job. The panic ends that piece of work only.
//! - [`Supervisor::spawn_restarted`]: a loop without state of its own, such as polling. It begins again after a pause.
//! - [`Supervisor::spawn_essential`] and [`Supervisor::wrap_essential_thread`]: without it the process would only seem to work.
//!   [`Supervisor::failed`] resolves, and the process exits with an error, so that its service manager restarts it.

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
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long [`Supervisor::shutdown`] waits for tasks to be dropped once it has aborted them.
const ABORT_GRACE: Duration = Duration::from_millis(250);
/// Pause before a task that panicked is restarted: doubled from the first to the last while it keeps panicking.
const RESTART_PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// A task that ran this long before its panic is restarted after the shortest pause again.
const STABLE_AFTER: Duration = Duration::from_secs(60);

/// Of all supervisors of the process.
static TASK_PANICS: AtomicU64 = AtomicU64::new(0);

/// Number of supervised tasks in this process that ended by a panic.
#[must_use]
pub fn task_panics() -> u64 {
    TASK_PANICS.load(Ordering::Relaxed)
}

/// Starts tasks, counts them, and ends them. Cloning is cheap and every clone is the same supervisor.
#[derive(Clone, Default)]
pub struct Supervisor {
    state: Arc<SupervisorState>,
}

#[derive(Default)]
struct SupervisorState {
    token: CancellationToken,
    tasks: Mutex<SupervisedTasks>,
    /// Told whenever the last task ends.
    idle: Notify,
    panics: AtomicUsize,
    /// The first essential task that panicked.
    failed: watch::Sender<Option<&'static str>>,
}

impl SupervisorState {
    /// Counts and logs a panic of the task.
    fn record_panic(&self, name: &'static str, panic: &(dyn Any + Send), then: &'static str) {
        self.panics.fetch_add(1, Ordering::Relaxed);
        TASK_PANICS.fetch_add(1, Ordering::Relaxed);
        tracing::error!(task = name, message_of_panic = panic_message(panic), then, "task panicked");
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
    /// Set when a shutdown has run out of time: a task started after that is aborted at once.
    aborted: bool,
}

struct SupervisedTask {
    name: &'static str,
    /// Missing only between the entry and the return of `tokio::spawn`.
    abort: Option<AbortHandle>,
}

/// The tasks that had not ended at the deadline of [`Supervisor::shutdown`]. They have been aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShutdownTimeoutError {
    /// How long the shutdown waited.
    pub waited: Duration,
    /// Number of tasks by name.
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
    /// A supervisor with no tasks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A supervisor with tasks, a token and a shutdown of its own. Only the failure of an essential task is shared with this one.
    #[must_use]
    pub fn child(&self) -> Self {
        let shared = SupervisorState { failed: self.state.failed.clone(), ..SupervisorState::default() };
        Self { state: Arc::new(shared) }
    }

    /// Starts `future` as a task called `name`: one piece of work, as a connection or a request.
    ///
    /// The handle may be dropped: the task goes on. The task is expected to end soon after
    /// [`Supervisor::token`] is cancelled. If it panics, the panic is logged with the name and counted in
    /// [`Supervisor::panics`]; the handle reports it too, and nothing else ends.
    ///
    /// Must be called inside a tokio runtime.
    pub fn spawn(
        &self,
        name: &'static str,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        self.spawn_monitored(name, false, future)
    }

    /// Starts a task that the process cannot do without: as [`Supervisor::spawn`], but after a panic
    /// [`Supervisor::failed`] resolves.
    pub fn spawn_essential(
        &self,
        name: &'static str,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        self.spawn_monitored(name, true, future)
    }

    /// Starts a task that is made again after a panic, with a growing pause, until it ends by itself or a shutdown begins.
    /// What `make` gives it must be usable after a panic, so it has no state that lives elsewhere and can be left half changed.
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
            let (shortest, longest) = RESTART_PAUSE;
            let mut pause = shortest;
            loop {
                let begun = Instant::now();
                let Err(panic) = AssertUnwindSafe(async { make().await }).catch_unwind().await else {
                    return;
                };
                shared.record_panic(name, panic.as_ref(), "it is restarted");
                if begun.elapsed() >= STABLE_AFTER {
                    pause = shortest;
                }
                if shared.token.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                    return;
                }
                pause = (pause * 2).min(longest);
            }
        })
    }

    /// Wraps the body of a thread that the process cannot do without: after a panic in it [`Supervisor::failed`] resolves.
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

    /// Resolves with its name when an essential task or thread has panicked; otherwise never.
    pub async fn failed(&self) -> &'static str {
        let mut failed = self.state.failed.subscribe();
        match failed.wait_for(Option::is_some).await.map(|name| *name) {
            Ok(Some(name)) => name,
            // The sender lives as long as this supervisor.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    /// Starts a task whose panic is recorded, and ends the process if it is essential.
    fn spawn_monitored(
        &self,
        name: &'static str,
        is_essential: bool,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        // Not an async block: that would have room for the future twice, before and after it is first polled.
        self.spawn_registered(name, move |registration| {
            AssertUnwindSafe(future).catch_unwind().map(move |outcome| {
                let shared = &registration.state;
                let Err(panic) = outcome else { return };
                let then = if is_essential { "the process ends" } else { "its work is lost" };
                shared.record_panic(name, panic.as_ref(), then);
                if is_essential {
                    shared.fail(name);
                }
                resume_unwind(panic);
            })
        })
    }

    /// Starts what `make` returns. It owns the registration, so that the entry goes when the task ends, is aborted, or is never polled.
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
        // The lock is not held across the spawn: a runtime that is shutting down drops the task inside it,
        // and the dropped registration takes this lock.
        let too_late = {
            let mut tasks = self.state.tasks.lock();
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
        self.state.token.clone()
    }

    /// Number of tasks that have been started and have not ended.
    #[must_use]
    pub fn running_tasks(&self) -> usize {
        self.state.tasks.lock().running.len()
    }

    /// Number of tasks that ended by a panic.
    #[must_use]
    pub fn panics(&self) -> usize {
        self.state.panics.load(Ordering::Relaxed)
    }

    /// Cancels the token and waits until every task has ended.
    ///
    /// Not to be awaited inside a task of this supervisor, which would wait for itself.
    ///
    /// # Errors
    /// When `deadline` has passed and tasks are left. They are named in the error and aborted.
    pub async fn shutdown(&self, deadline: Duration) -> Result<(), ShutdownTimeoutError> {
        self.state.token.cancel();
        if tokio::time::timeout(deadline, self.wait_idle()).await.is_ok() {
            return Ok(());
        }
        let left = self.abort_all();
        if left.is_empty() {
            return Ok(());
        }
        // A task is dropped by its worker thread, not by the call to abort.
        let _ = tokio::time::timeout(ABORT_GRACE, self.wait_idle()).await;
        Err(ShutdownTimeoutError { waited: deadline, tasks: left })
    }

    /// Resolves when no task runs.
    async fn wait_idle(&self) {
        loop {
            let mut told = std::pin::pin!(self.state.idle.notified());
            // Enlisted before the count is read, so that an end in between is not missed.
            told.as_mut().enable();
            if self.running_tasks() == 0 {
                return;
            }
            told.await;
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
            .field("alive", &self.running_tasks())
            .field("panics", &self.panics())
            .field("shutting_down", &self.state.token.is_cancelled())
            .finish()
    }
}

/// The entry of one task; dropping it takes the entry out.
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
        .unwrap_or("(a value that is not text)")
}
