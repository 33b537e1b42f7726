//! One thread and its connections.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use moongate_runtime::net::{DetachedStream, attach};
use moongate_runtime::{OwnThread, Supervisor};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;

use super::awake::Thread;
use super::budget::Budget;
use super::connection;
use crate::call::Caller;
use crate::server::Server;

/// Connections that wait for a thread to take them.
const WAITING: usize = 256;

/// A connection on its way to a thread.
pub(super) struct Accepted {
    pub(super) stream: DetachedStream,
    pub(super) host: IpAddr,
    /// Its place among all connections.
    pub(super) slot: OwnedSemaphorePermit,
}

pub(super) struct Worker {
    pub(super) server: Arc<Server>,
    pub(super) budget: Arc<Budget>,
    pub(super) thread: Thread,
    pub(super) supervisor: Supervisor,
    pub(super) stop: CancellationToken,
    /// The number of the thread.
    pub(super) lane: usize,
}

impl Worker {
    /// Starts the thread. It ends when `stop` is cancelled and its connections have ended.
    pub(super) fn start(self) -> io::Result<mpsc::Sender<Accepted>> {
        let (sender, receiver) = mpsc::channel(WAITING);
        let supervisor = self.supervisor.clone();
        let name = format!("rpc-{}", self.lane);
        let thread = OwnThread::start(&supervisor, "rpc thread", name, self.run(receiver))?;
        // The thread is no task, so a task stands for it.
        supervisor.spawn("rpc thread", thread.ended());
        Ok(sender)
    }

    async fn run(self, mut accepted: mpsc::Receiver<Accepted>) {
        let (open, mut all_closed) = mpsc::channel::<()>(1);
        loop {
            let next = tokio::select! {
                next = accepted.recv() => next,
                () = self.stop.cancelled() => None,
            };
            let Some(next) = next else { break };
            if let Err(error) = self.take(next, open.clone()) {
                tracing::debug!(%error, "a connection was gone before it was served");
            }
        }
        drop(open);
        // Nothing is ever sent: this returns when the last connection has dropped its end.
        let _ = all_closed.recv().await;
    }

    fn take(&self, Accepted { stream, host, slot }: Accepted, open: mpsc::Sender<()>) -> io::Result<()> {
        let stream = attach(stream)?;
        let caller = Caller::new(Arc::clone(&self.server), host, self.lane);
        let serving = connection::serve(
            stream,
            caller,
            self.server.limits,
            Arc::clone(&self.budget),
            self.thread.clone(),
            self.stop.clone(),
        );
        self.supervisor.spawn("rpc connection", async move {
            serving.await;
            drop((slot, open));
        });
        Ok(())
    }
}
