//! A future on a thread of its own.

use std::io;

use tokio::sync::oneshot;

use crate::Supervisor;

/// Runs a future to its end on a thread that runs nothing else, in a runtime of its own.
#[derive(Debug)]
pub struct DedicatedThread {
    ended: oneshot::Receiver<()>,
}

impl DedicatedThread {
    /// Starts it. After a panic in it [`Supervisor::failed`] resolves.
    ///
    /// # Errors
    /// When there can be no thread, or no runtime for it.
    #[cfg(not(feature = "simulation"))]
    pub fn start(
        supervisor: &Supervisor,
        task: &'static str,
        thread: String,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<Self> {
        let (ending, ended) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let body = supervisor.wrap_essential_thread(task, move || {
            runtime.block_on(future);
            drop(runtime);
            drop(ending);
        });
        std::thread::Builder::new().name(thread).spawn(body)?;
        Ok(Self { ended })
    }

    /// Starts it as a task: a simulation has one thread.
    ///
    /// # Errors
    /// None.
    #[cfg(feature = "simulation")]
    pub fn start(
        supervisor: &Supervisor,
        task: &'static str,
        _thread: String,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<Self> {
        let (ending, ended) = oneshot::channel();
        supervisor.spawn_essential(task, async move {
            future.await;
            drop(ending);
        });
        Ok(Self { ended })
    }

    /// Waits for its end.
    pub async fn join(self) {
        // Nothing is ever sent: this returns when the other end is dropped.
        let _ = self.ended.await;
    }
}

#[cfg(all(test, not(feature = "simulation")))]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn a_future_runs_on_another_thread_and_its_end_is_awaited() {
        let (sender, receiver) = mpsc::channel();
        let future = async move {
            tokio::task::yield_now().await;
            sender.send(thread::current().name().map(str::to_owned)).unwrap();
        };
        let own = DedicatedThread::start(&Supervisor::new(), "test", "own".to_owned(), future).unwrap();
        own.join().await;
        assert_eq!(receiver.try_recv(), Ok(Some("own".to_owned())));
    }

    #[tokio::test]
    async fn a_panic_ends_it_and_is_reported() {
        let supervisor = Supervisor::new();
        let own = DedicatedThread::start(&supervisor, "test", "own".to_owned(), async { panic!("a test's") })
            .unwrap();
        own.join().await;
        assert_eq!(supervisor.failed().await, "test");
    }
}
