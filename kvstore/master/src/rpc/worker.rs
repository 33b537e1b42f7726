//! One thread and the connections that it serves.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::net::{DetachedStream, TcpStream, attach};
use moongate_runtime::{CertificateFingerprint, DedicatedThread, PeerTls, Supervisor, describe_tls_error};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::budget::BufferBudget;
use super::busy_poll::RpcThread;
use super::connection::{self, ConnectionContext};
use crate::call::CallerSession;
use crate::rpc_stream::RpcStream;
use crate::server::MasterServer;

/// Maximum number of accepted connections that wait for one thread.
const MAX_PENDING_CONNECTIONS: usize = 256;

/// An accepted connection on its way to a thread.
pub(super) struct AcceptedConnection {
    pub(super) stream: DetachedStream,
    pub(super) host: IpAddr,
    /// Its permit among all connections.
    pub(super) slot: OwnedSemaphorePermit,
}

pub(super) struct RpcWorker {
    pub(super) server: Arc<MasterServer>,
    pub(super) budget: Arc<BufferBudget>,
    pub(super) thread: RpcThread,
    pub(super) supervisor: Supervisor,
    pub(super) stop: CancellationToken,
    /// Index of the thread.
    pub(super) lane: usize,
}

impl RpcWorker {
    /// Starts the thread. It ends after `stop` is cancelled and its connections have ended.
    pub(super) fn start(self) -> io::Result<mpsc::Sender<AcceptedConnection>> {
        let (sender, receiver) = mpsc::channel(MAX_PENDING_CONNECTIONS);
        let supervisor = self.supervisor.clone();
        let name = format!("rpc-{}", self.lane);
        let thread = DedicatedThread::start(&supervisor, "rpc thread", name, self.run(receiver))?;
        // The supervisor waits for tasks only, so this task represents the thread.
        supervisor.spawn("rpc thread", thread.join());
        Ok(sender)
    }

    async fn run(self, mut accepted: mpsc::Receiver<AcceptedConnection>) {
        let (open, mut all_closed) = mpsc::channel::<()>(1);
        loop {
            let next = tokio::select! {
                next = accepted.recv() => next,
                () = self.stop.cancelled() => None,
            };
            let Some(next) = next else { break };
            if let Err(error) = self.accept(next, open.clone()) {
                tracing::debug!(%error, "a connection closed before it was served");
            }
        }
        drop(open);
        // Nothing is sent on this channel: it closes when the last connection drops its sender.
        let _ = all_closed.recv().await;
    }

    fn accept(
        &self,
        AcceptedConnection { stream, host, slot }: AcceptedConnection,
        open: mpsc::Sender<()>,
    ) -> io::Result<()> {
        let stream = attach(stream)?;
        let caller = CallerSession::new(Arc::clone(&self.server), host, self.lane);
        let context = ConnectionContext {
            limits: self.server.limits,
            budget: Arc::clone(&self.budget),
            thread: self.thread.clone(),
            stop: self.stop.clone(),
        };
        if let Some(tls) = self.server.tls.clone() {
            let server = Arc::clone(&self.server);
            self.supervisor.spawn("rpc connection", async move {
                let handshake = authenticate(stream, &tls, context.limits.stall_timeout);
                let accepted = context.stop.run_until_cancelled(handshake).await;
                match accepted {
                    Some(Ok((stream, peer))) => {
                        let caller = caller.with_certificate(peer);
                        connection::serve(stream, caller, context).await;
                    }
                    Some(Err(error)) => report_unauthenticated(&server, host, &error),
                    None => {}
                }
                drop((slot, open));
            });
            return Ok(());
        }
        let connection_task = connection::serve(RpcStream::Plain(stream), caller, context);
        self.supervisor.spawn("rpc connection", async move {
            connection_task.await;
            drop((slot, open));
        });
        Ok(())
    }
}

/// Runs the TLS handshake and returns the caller's certificate.
async fn authenticate(
    stream: TcpStream,
    tls: &PeerTls,
    handshake_timeout: Duration,
) -> io::Result<(RpcStream, CertificateFingerprint)> {
    let (stream, peer) = timeout(handshake_timeout, tls.accept(stream)).await??;
    Ok((RpcStream::Secured(Box::new(stream)), peer))
}

fn report_unauthenticated(server: &MasterServer, host: IpAddr, error: &io::Error) {
    let error = describe_tls_error(error);
    if server.capabilities.add_unauthenticated() {
        tracing::warn!(%host, error, "rejected an RPC connection without client authentication");
    } else {
        tracing::debug!(%host, error, "rejected an RPC connection without client authentication");
    }
}
