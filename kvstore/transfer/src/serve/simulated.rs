//! The data plane on a simulated network: one task per connection in the place of a thread.
//!
//! Requests, answers and their order are those of `connection.rs`, and so are the calls of [`TransferTarget`]. Kernel calls that move bytes
//! between a socket and the memory are replaced by copies, and limits of time and number are left out.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moongate_runtime::Supervisor;
use moongate_runtime::net::{TcpListener, TcpStream};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

use super::{AddressRange, Counts, TransferServerOptions, TransferTarget};
use crate::plane::{
    self, HEADER, STATUS, TransferHeader, TransferOperation, TransferProtocol, TransferStatus,
};

/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The body of one transfer: what has arrived of it, or what is to be sent.
#[derive(Debug, Default)]
pub struct DataSocket {
    body: Mutex<Vec<u8>>,
}

impl DataSocket {
    /// What has arrived of a body. It is shorter than the body if the connection broke before its end.
    #[must_use]
    pub fn received(&self) -> Vec<u8> {
        self.body.lock().clone()
    }

    /// Sends bytes.
    pub fn send(&self, bytes: &[u8]) {
        self.body.lock().extend_from_slice(bytes);
    }
}

/// A data plane that is served.
#[derive(Debug)]
pub struct TransferServer {
    counts: Arc<Counts>,
    open: Arc<AtomicUsize>,
    stop: CancellationToken,
}

/// Serves `target` until [`TransferServer::drain`]. When the supervisor shuts down, everything is cut.
///
/// # Errors
/// None.
pub fn listen(
    listener: TcpListener,
    target: Arc<dyn TransferTarget>,
    options: TransferServerOptions,
    supervisor: &Supervisor,
) -> io::Result<TransferServer> {
    let stop = supervisor.token().child_token();
    let serving = TransferServer { counts: Arc::default(), open: Arc::default(), stop: stop.clone() };
    let (counts, open, tasks) = (Arc::clone(&serving.counts), Arc::clone(&serving.open), supervisor.clone());
    supervisor.spawn_essential("transfer-listener", async move {
        let accept = async {
            loop {
                let Ok((stream, peer)) = listener.accept().await else {
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                };
                if !options.peers.allow(peer.ip()) {
                    counts.not_allowed.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                counts.opened.fetch_add(1, Ordering::Relaxed);
                open.fetch_add(1, Ordering::Relaxed);
                let connection =
                    SimulatedConnection { stream, target: Arc::clone(&target), counts: Arc::clone(&counts) };
                let (counts, open, stop) = (Arc::clone(&counts), Arc::clone(&open), stop.clone());
                tasks.spawn("transfer", async move {
                    // An error here means that the peer is gone, so there is no one to report it to.
                    let _ = stop.run_until_cancelled(connection.run()).await;
                    counts.closed.fetch_add(1, Ordering::Relaxed);
                    open.fetch_sub(1, Ordering::Relaxed);
                });
            }
        };
        stop.run_until_cancelled(accept).await;
    });
    Ok(serving)
}

impl TransferServer {
    /// What has been done.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Connections that are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Cuts all connections, and returns how many these were.
    pub async fn drain(&self, _limit: Duration) -> usize {
        self.stop.cancel();
        tokio::task::yield_now().await;
        self.open()
    }
}

impl Drop for TransferServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct SimulatedConnection {
    stream: TcpStream,
    target: Arc<dyn TransferTarget>,
    counts: Arc<Counts>,
}

impl SimulatedConnection {
    async fn run(mut self) -> io::Result<()> {
        loop {
            let mut header = [0; HEADER];
            self.stream.read_exact(&mut header).await?;
            let header = TransferHeader::decode(&header).map_err(io::Error::other)?;
            let span = AddressRange { start: header.address, size: header.size };
            if !self.is_allowed(header.operation, span) {
                self.counts.rejected.fetch_add(1, Ordering::Relaxed);
                if header.protocol != TransferProtocol::V1 {
                    self.stream.write_all(&TransferStatus::Rejected.encode()).await?;
                    self.stream.shutdown().await?;
                }
                return Ok(());
            }
            let moved = match header.operation {
                TransferOperation::Read => self.read(span, header.protocol).await,
                TransferOperation::Write => self.write(span, header.protocol).await,
            };
            if moved.is_err() {
                self.counts.failed.fetch_add(1, Ordering::Relaxed);
            }
            moved?;
            self.counts.record_transfer(header.operation, header.protocol, span.size, 0);
        }
    }

    fn is_allowed(&self, operation: TransferOperation, span: AddressRange) -> bool {
        let possible = span.size > 0 && span.start.checked_add(span.size).is_some();
        possible
            && self.target.contains(span)
            && (operation == TransferOperation::Write || self.target.is_readable(span))
    }

    /// The peer reads.
    async fn read(&mut self, span: AddressRange, protocol: TransferProtocol) -> io::Result<()> {
        if protocol != TransferProtocol::V1 {
            self.stream.write_all(&TransferStatus::Ok.encode()).await?;
        }
        let socket = DataSocket::default();
        let crc = match self.target.checksum(span) {
            Some(known) => {
                self.target.send(&socket, span)?;
                known
            }
            None => self.target.send_summed(&socket, span)?,
        };
        self.stream.write_all(&socket.received()).await?;
        if protocol == TransferProtocol::Checked {
            self.stream.write_all(&plane::trailer(crc)).await?;
        }
        Ok(())
    }

    /// The peer writes. As much as arrives is in the memory afterwards, as a kernel leaves it.
    async fn write(&mut self, span: AddressRange, protocol: TransferProtocol) -> io::Result<()> {
        let checked = protocol == TransferProtocol::Checked;
        let socket = DataSocket::default();
        let mut trailer = [0; STATUS];
        let arrived = self.receive_body(span.size, &socket, checked.then_some(&mut trailer)).await;
        let mut whole = |crc: Option<u32>| match &arrived {
            Ok(()) => Ok(!checked || plane::checksum(trailer) == crc),
            Err(error) => Err(error.kind().into()),
        };
        let is_whole = self.target.receive(&socket, span, checked, &mut whole)?;
        if !is_whole {
            self.counts.damaged.fetch_add(1, Ordering::Relaxed);
        }
        match protocol {
            TransferProtocol::V1 => Ok(()),
            _ if is_whole => self.stream.write_all(&TransferStatus::Ok.encode()).await,
            _ => self.stream.write_all(&TransferStatus::Damaged.encode()).await,
        }
    }

    async fn receive_body(
        &mut self,
        size: u64,
        socket: &DataSocket,
        trailer: Option<&mut [u8; STATUS]>,
    ) -> io::Result<()> {
        let mut left = usize::try_from(size).map_err(io::Error::other)?;
        let mut piece = [0; 16 << 10];
        while left > 0 {
            let room = left.min(piece.len());
            let got = self.stream.read(&mut piece[..room]).await?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            socket.send(&piece[..got]);
            left -= got;
        }
        if let Some(trailer) = trailer {
            self.stream.read_exact(trailer).await?;
        }
        Ok(())
    }
}
