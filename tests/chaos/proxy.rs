//! A TCP proxy whose link can be cut and slowed down.

use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::Supervisor;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The state of a link through the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProxiedLinkState {
    Open,
    Cut,
    Slow,
}

/// Bytes that pass at a time on a slow link, and the pause after them.
const SLOW_PIECE: usize = 1 << 10;
const SLOW_PAUSE: Duration = Duration::from_millis(62);

pub(crate) struct ChaosProxy {
    pub(crate) address: String,
    state: Arc<watch::Sender<ProxiedLinkState>>,
}

impl ChaosProxy {
    /// Passes connections on to `behind`.
    pub(crate) async fn start(behind: String, supervisor: &Supervisor) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let state = Arc::new(watch::Sender::new(ProxiedLinkState::Open));
        let (links, tasks, stop) = (state.clone(), supervisor.clone(), supervisor.token());
        let accept = async move {
            while let Ok((outside, _)) = listener.accept().await {
                let (behind, links, stop) = (behind.clone(), links.subscribe(), tasks.token());
                tasks.spawn("pass a connection", async move {
                    stop.run_until_cancelled(pass(outside, behind, links)).await.unwrap_or_default();
                });
            }
        };
        supervisor.spawn("proxy", async move { stop.run_until_cancelled(accept).await.unwrap_or_default() });
        Self { address, state }
    }

    pub(crate) fn set(&self, state: ProxiedLinkState) {
        self.state.send_replace(state);
    }
}

async fn pass(mut outside: TcpStream, behind: String, mut link: watch::Receiver<ProxiedLinkState>) {
    if *link.borrow() == ProxiedLinkState::Cut {
        return;
    }
    let Ok(mut inside) = TcpStream::connect(&behind).await else { return };
    let (mut from_outside, mut to_outside) = outside.split();
    let (mut from_inside, mut to_inside) = inside.split();
    let mut cut = link.clone();
    tokio::select! {
        () = copy(&mut from_outside, &mut to_inside, link.clone()) => {}
        () = copy(&mut from_inside, &mut to_outside, link.clone()) => {}
        _ = cut.wait_for(|state| *state == ProxiedLinkState::Cut) => {}
    }
    link.mark_unchanged();
}

/// Ends with either side: half-closed connections are not used here.
async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    link: watch::Receiver<ProxiedLinkState>,
) {
    let mut piece = vec![0; 64 << 10];
    loop {
        let slow = *link.borrow() == ProxiedLinkState::Slow;
        let room = if slow { SLOW_PIECE } else { piece.len() };
        let Ok(read @ 1..) = from.read(&mut piece[..room]).await else { return };
        if to.write_all(&piece[..read]).await.is_err() {
            return;
        }
        if slow {
            tokio::time::sleep(SLOW_PAUSE).await;
        }
    }
}
