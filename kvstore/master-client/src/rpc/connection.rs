//! The task of one connection, which connects on demand and reconnects after failures.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use moongate_runtime::net::TcpStream;
use moongate_runtime::{Backoff, PeerTls};
use tokio::sync::mpsc;

use super::error::{MasterConnectError, RpcError};
use super::locate::MasterLocator;
use super::master::MasterClientOptions;
use super::session::{MasterSession, PendingCall, SessionEnd};
use super::shard_check;
use super::transport::RpcTransport;

pub(super) struct MasterConnection {
    locator: Arc<MasterLocator>,
    options: MasterClientOptions,
    tls: Option<PeerTls>,
    calls: mpsc::Receiver<PendingCall>,
    backoff: Backoff,
    /// End of the current pause between attempts, and the error that calls get until then.
    pause: Option<(Instant, RpcError)>,
}

impl MasterConnection {
    pub(super) fn new(
        locator: Arc<MasterLocator>,
        options: MasterClientOptions,
        tls: Option<PeerTls>,
        calls: mpsc::Receiver<PendingCall>,
    ) -> Self {
        Self { locator, options, tls, calls, backoff: Backoff::new(options.retry), pause: None }
    }

    /// Serves calls until all clients are dropped.
    pub(super) async fn run(mut self) {
        while let Some(call) = self.calls.recv().await {
            match &self.pause {
                Some((until, error)) if Instant::now() < *until => {
                    let _ = call.reply.send(Err(error.clone()));
                }
                _ => {
                    let mut next = Some(call);
                    while let Some(call) = next {
                        next = self.open(call).await;
                    }
                }
            }
        }
    }

    /// Connects for `call`, and serves calls until the connection ends. Returns a call that needs a new connection.
    async fn open(&mut self, call: PendingCall) -> Option<PendingCall> {
        let (address, stream) = match self.dial().await {
            Ok(dialed) => dialed,
            Err(error) => {
                let _ = call.reply.send(Err(error.clone()));
                self.pause_after(error);
                return None;
            }
        };
        let mut session = MasterSession::new(&address, &self.options);
        session.begin(call);
        let error = match session.run(stream, &mut self.calls).await {
            Ok(SessionEnd::CallersGone) => return None,
            Ok(SessionEnd::CertificateRenewed(call)) => return Some(call),
            Err(error) => error,
        };
        session.fail(&error);
        if session.answered {
            // No pause after a session that worked: the master may have restarted.
            self.backoff.reset();
            self.pause = None;
        } else {
            self.pause_after(error);
        }
        None
    }

    fn pause_after(&mut self, error: RpcError) {
        self.backoff.record_failure();
        self.pause = Some((Instant::now() + self.backoff.jittered_pause(), error));
    }

    async fn dial(&self) -> Result<(Arc<str>, RpcTransport), RpcError> {
        let address = self.locator.locate().await?;
        let connecting = async {
            let stream = TcpStream::connect(&*address).await?;
            stream.set_nodelay(true)?;
            match &self.tls {
                None => Ok(RpcTransport::Plain(stream)),
                Some(tls) => RpcTransport::secure(stream, &address, tls).await,
            }
        };
        let limit = self.options.connect_timeout;
        let source = match tokio::time::timeout(limit, connecting).await {
            Ok(Ok(mut stream)) => {
                if let Some(expected) = self.options.shard {
                    shard_check::check(&mut stream, &address, expected, limit).await?;
                }
                return Ok((address, stream));
            }
            Ok::<io::Result<_>, _>(Err(error)) => MasterConnectError::Io(Arc::new(error)),
            Err(_) => MasterConnectError::TimedOut(limit),
        };
        Err(RpcError::Unreachable { address, source })
    }
}
