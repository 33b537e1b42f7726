//! The data plane on a simulated network: one task per connection instead of a thread.
//!
//! Requests, responses and their order are those of `connection.rs`, and so are the calls of [`TransferTarget`]. Kernel calls that move
//! bytes between a socket and the memory are replaced by copies; time and connection limits are left out.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moongate_runtime::Supervisor;
use moongate_runtime::net::{TcpListener, TcpStream};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

use super::{AddressRange, TransferCounters, TransferServerOptions, TransferTarget};
use crate::plane::{
    self, HEADER, STATUS, TransferHeader, TransferOperation, TransferProtocol, TransferStatus,
};

/// Pause after an accept that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The body of one transfer: bytes received so far, or bytes to send.
#[derive(Debug, Default)]
pub struct DataSocket {
    body: Mutex<Vec<u8>>,
}

impl DataSocket {
    /// The received part of a body, shorter than the body if the connection broke.
    #[must_use]
    pub fn received(&self) -> Vec<u8> {
        self.body.lock().clone()
    }

    /// Appends bytes to the body.
    pub fn send(&self, bytes: &[u8]) {
        self.body.lock().extend_from_slice(bytes);
    }
}

/// Handle of a running data plane server.
#[derive(Debug)]
pub struct TransferServer {
    counts: Arc<TransferCounters>,
    open: Arc<AtomicUsize>,
    stop: CancellationToken,
}

/// Serves `target` until [`TransferServer::drain`]. A shutdown of the supervisor closes all connections at once.
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
    let server = TransferServer { counts: Arc::default(), open: Arc::default(), stop: stop.clone() };
    let (counts, open, tasks) = (Arc::clone(&server.counts), Arc::clone(&server.open), supervisor.clone());
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
                    // An error means that the peer is gone, so it cannot be reported.
                    let _ = stop.run_until_cancelled(connection.run()).await;
                    counts.closed.fetch_add(1, Ordering::Relaxed);
                    open.fetch_sub(1, Ordering::Relaxed);
                });
            }
        };
        stop.run_until_cancelled(accept).await;
    });
    Ok(server)
}

impl TransferServer {
    #[must_use]
    pub fn counts(&self) -> &TransferCounters {
        &self.counts
    }

    #[must_use]
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Closes all connections and returns their number.
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
    counts: Arc<TransferCounters>,
}

impl SimulatedConnection {
    async fn run(mut self) -> io::Result<()> {
        loop {
            let mut header = [0; HEADER];
            self.stream.read_exact(&mut header).await?;
            let header = TransferHeader::decode(&header).map_err(io::Error::other)?;
            let range = AddressRange { start: header.address, size: header.size };
            // Nothing maps memory in a simulation.
            let is_mapped = matches!(header.protocol, TransferProtocol::Mapped(_));
            if is_mapped || !self.is_allowed(header.operation, range) {
                self.counts.rejected.fetch_add(1, Ordering::Relaxed);
                if header.protocol != TransferProtocol::V1 {
                    self.stream.write_all(&TransferStatus::Rejected.encode()).await?;
                    self.stream.shutdown().await?;
                }
                return Ok(());
            }
            let moved = match header.operation {
                TransferOperation::Read => self.read(range, header.protocol).await,
                TransferOperation::Write => self.write(range, header.protocol).await,
            };
            if moved.is_err() {
                self.counts.failed.fetch_add(1, Ordering::Relaxed);
            }
            moved?;
            self.counts.record_transfer(header.operation, header.protocol, range.size, 0);
        }
    }

    fn is_allowed(&self, operation: TransferOperation, range: AddressRange) -> bool {
        let possible = range.size > 0 && range.start.checked_add(range.size).is_some();
        possible
            && self.target.contains(range)
            && (operation == TransferOperation::Write || self.target.is_readable(range))
    }

    /// Serves a read of the peer.
    async fn read(&mut self, range: AddressRange, protocol: TransferProtocol) -> io::Result<()> {
        if protocol != TransferProtocol::V1 {
            self.stream.write_all(&TransferStatus::Ok.encode()).await?;
        }
        let socket = DataSocket::default();
        let crc = match self.target.checksum(range) {
            Some(recorded) => {
                self.target.send(&socket, range)?;
                recorded
            }
            None => self.target.send_summed(&socket, range)?,
        };
        self.stream.write_all(&socket.received()).await?;
        if protocol == TransferProtocol::Checked {
            self.stream.write_all(&plane::trailer(crc)).await?;
        }
        Ok(())
    }

    /// Serves a write of the peer. A body that breaks off leaves its received part in memory, as a kernel does.
    async fn write(&mut self, range: AddressRange, protocol: TransferProtocol) -> io::Result<()> {
        let checked = protocol == TransferProtocol::Checked;
        let socket = DataSocket::default();
        let mut trailer = [0; STATUS];
        let received = self.receive_body(range.size, &socket, checked.then_some(&mut trailer)).await;
        let mut is_intact = |crc: Option<u32>| match &received {
            Ok(()) => Ok(!checked || plane::checksum(trailer) == crc),
            Err(error) => Err(error.kind().into()),
        };
        let intact = self.target.receive(&socket, range, checked, &mut is_intact)?;
        if !intact {
            self.counts.damaged.fetch_add(1, Ordering::Relaxed);
        }
        match protocol {
            TransferProtocol::V1 => Ok(()),
            _ if intact => self.stream.write_all(&TransferStatus::Ok.encode()).await,
            _ => self.stream.write_all(&TransferStatus::Damaged.encode()).await,
        }
    }

    async fn receive_body(
        &mut self,
        size: u64,
        socket: &DataSocket,
        trailer: Option<&mut [u8; STATUS]>,
    ) -> io::Result<()> {
        let mut remaining = usize::try_from(size).map_err(io::Error::other)?;
        let mut buffer = [0; 16 << 10];
        while remaining > 0 {
            let limit = remaining.min(buffer.len());
            let bytes_read = self.stream.read(&mut buffer[..limit]).await?;
            if bytes_read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            socket.send(&buffer[..bytes_read]);
            remaining -= bytes_read;
        }
        if let Some(trailer) = trailer {
            self.stream.read_exact(trailer).await?;
        }
        Ok(())
    }
}
