//! A segment of the store that is mounted in this process.

use std::io;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use moongate_runtime::Supervisor;
use moongate_store_node::{NodeArgs, NodeConfig, NodeStartError, RunningNode};
use tokio::sync::oneshot;

/// How long the node's tasks may take to end after the segment was unmounted.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// The segment cannot be mounted.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedNodeError {
    #[error("cannot start the thread of the segment: {0}")]
    Thread(#[from] io::Error),
    #[error(transparent)]
    Start(#[from] NodeStartError),
    #[error("the thread of the segment ended before it was mounted")]
    Ended,
}

/// A mounted segment with the thread that serves it. It is unmounted on drop.
#[derive(Debug)]
pub struct EmbeddedNode {
    endpoint: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl EmbeddedNode {
    /// Mounts a segment, and serves it on threads of its own.
    ///
    /// # Errors
    /// [`EmbeddedNodeError`], after the flags' time limit if the master does not answer.
    pub fn start(flags: NodeArgs, config: NodeConfig) -> Result<Self, EmbeddedNodeError> {
        let (started_sender, started) = mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let body = move || runtime.block_on(serve(flags, config, &started_sender, stopped));
        let thread = std::thread::Builder::new().name("store-segment".to_owned()).spawn(body)?;
        let endpoint = started.recv().map_err(|_| EmbeddedNodeError::Ended)??;
        Ok(Self { endpoint, stop: Some(stop), thread: Some(thread) })
    }

    /// The segment's name, as `host:port`.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }
}

/// Unmounts the segment and ends its transfers.
impl Drop for EmbeddedNode {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of a mounted segment panicked");
        }
    }
}

async fn serve(
    flags: NodeArgs,
    config: NodeConfig,
    started: &mpsc::Sender<Result<String, NodeStartError>>,
    stopped: oneshot::Receiver<()>,
) {
    let supervisor = Supervisor::new();
    let node = match moongate_store_node::start_without_http(flags, config, &supervisor).await {
        Ok(node) => node,
        Err(error) => {
            // `start` waits for this.
            let _ = started.send(Err(error));
            return;
        }
    };
    let _ = started.send(Ok(node.endpoint().to_owned()));
    run(node, &supervisor, stopped).await;
}

async fn run(node: RunningNode, supervisor: &Supervisor, stopped: oneshot::Receiver<()>) {
    tokio::select! {
        // Nothing is ever sent: it ends when the sender is dropped.
        _ = stopped => {}
        task = supervisor.failed() => {
            tracing::error!(task, "a task of the mounted segment panicked; the segment is unmounted");
        }
    }
    node.stop().await;
    if let Err(error) = supervisor.shutdown(STOP_LIMIT).await {
        tracing::warn!(%error, "tasks of the unmounted segment did not end in time");
    }
}
