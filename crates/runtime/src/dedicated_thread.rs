//! Runs a future on a dedicated thread.

use std::io;

use tokio::sync::oneshot;

use crate::Supervisor;

/// A thread with its own runtime that runs a single future to completion.
#[derive(Debug)]
pub struct DedicatedThread {
    ended: oneshot::Receiver<()>,
}

impl DedicatedThread {
    /// Starts the thread. After a panic in it [`Supervisor::failed`] resolves.
    ///
    /// # Errors
    /// When the thread or its runtime cannot be created.
    #[cfg(not(feature = "simulation"))]
    pub fn start(
        supervisor: &Supervisor,
        task: &'static str,
        thread: String,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<Self> {
        let (end_sender, ended) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let body = supervisor.wrap_essential_thread(task, move || {
            runtime.block_on(future);
            drop(runtime);
            drop(end_sender);
        });
        std::thread::Builder::new().name(thread).spawn(body)?;
        Ok(Self { ended })
    }

    /// Starts the future as a task: a simulation has one thread.
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
        let (end_sender, ended) = oneshot::channel();
        supervisor.spawn_essential(task, async move {
            future.await;
            drop(end_sender);
        });
        Ok(Self { ended })
    }

    /// Waits until the future has ended.
    pub async fn join(self) {
        // Nothing is ever sent: this returns when the sender is dropped.
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
        let dedicated = DedicatedThread::start(&Supervisor::new(), "test", "own".to_owned(), future).unwrap();
        dedicated.join().await;
        assert_eq!(receiver.try_recv(), Ok(Some("own".to_owned())));
    }

    #[tokio::test]
    async fn a_panic_ends_it_and_is_reported() {
        let supervisor = Supervisor::new();
        let dedicated = DedicatedThread::start(&supervisor, "test", "own".to_owned(), async {
            panic!("a panic on purpose")
        })
        .unwrap();
        dedicated.join().await;
        assert_eq!(supervisor.failed().await, "test");
    }
}
