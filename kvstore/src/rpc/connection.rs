//! The task behind a connection: opens it when there is a call, again and again.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use moongate_runtime::PeerTls;
use moongate_runtime::net::TcpStream;
use tokio::sync::mpsc;

use super::error::RpcError;
use super::locate::MasterLocator;
use super::master::Options;
use super::session::{Call, Ended, Session};
use super::transport::Transport;
use crate::backoff::Backoff;

pub(super) struct Connection {
    locator: Arc<MasterLocator>,
    options: Options,
    tls: Option<PeerTls>,
    calls: mpsc::Receiver<Call>,
    backoff: Backoff,
    /// Until when no new attempt is made, and why.
    pause: Option<(Instant, RpcError)>,
}

impl Connection {
    pub(super) fn new(
        locator: Arc<MasterLocator>,
        options: Options,
        tls: Option<PeerTls>,
        calls: mpsc::Receiver<Call>,
    ) -> Self {
        Self { locator, options, tls, calls, backoff: Backoff::new(options.retry), pause: None }
    }

    /// Serves calls until nobody is left who could make one.
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

    /// Opens the connection for `call` and uses it as long as it lasts. Returns a call that needs a new connection.
    async fn open(&mut self, call: Call) -> Option<Call> {
        let (address, stream) = match self.dial().await {
            Ok(dialed) => dialed,
            Err(error) => {
                let _ = call.reply.send(Err(error.clone()));
                self.pause_after(error);
                return None;
            }
        };
        let mut session = Session::new(&address, &self.options);
        session.begin(call);
        let error = match session.run(stream, &mut self.calls).await {
            Ok(Ended::Unused) => return None,
            Ok(Ended::Renewed(call)) => return Some(call),
            Err(error) => error,
        };
        session.fail(&error);
        if session.answered {
            // A master that worked until now is worth an attempt at once: it may have been restarted.
            self.backoff.succeeded();
            self.pause = None;
        } else {
            self.pause_after(error);
        }
        None
    }

    fn pause_after(&mut self, error: RpcError) {
        self.backoff.failed();
        self.pause = Some((Instant::now() + self.backoff.pause(), error));
    }

    async fn dial(&self) -> Result<(Arc<str>, Transport), RpcError> {
        let address = self.locator.locate().await?;
        let connecting = async {
            let stream = TcpStream::connect(&*address).await?;
            stream.set_nodelay(true)?;
            match &self.tls {
                None => Ok(Transport::Plain(stream)),
                Some(tls) => Transport::secure(stream, &address, tls).await,
            }
        };
        let failure = match tokio::time::timeout(self.options.connect_limit, connecting).await {
            Ok(Ok(stream)) => return Ok((address, stream)),
            Ok::<io::Result<_>, _>(Err(error)) => error.to_string(),
            Err(_) => format!("no connection within {:?}", self.options.connect_limit),
        };
        Err(RpcError::Unreachable { address, reason: failure })
    }
}
