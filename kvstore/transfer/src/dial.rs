//! Client of the data plane: reads and writes another node's memory over one connection, one transfer at a time.

use std::io::{self, IoSlice};
use std::time::Duration;

use crc_fast::{CrcAlgorithm, Digest};
use mooncake_wire::capability::{CAPABILITY, Capability};
use moongate_runtime::busy_poll::{AdaptivePoller, try_receive};
use moongate_runtime::net::TcpStream;
use moongate_runtime::{PeerTls, is_tls_alert};

use crate::channel::TransferChannel;
use crate::cpu_spread::CpuSpreader;
use crate::error::{BrokenConnectionError, TransferConnectError, TransferError};
use crate::limits::TransferLimits;
use crate::plane::{
    self, HEADER, STATUS, TransferHeader, TransferOperation, TransferProtocol, TransferStatus,
};

/// Bytes per checksum update, small enough that bytes just copied are still in the core's cache.
const CHECKSUM_CHUNK: usize = 256 << 10;
/// Ranges of memory per system call that sends. Linux allows 1024.
const RANGES_PER_CALL: usize = 256;

/// A connection to a node's data plane.
#[derive(Debug)]
pub struct TransferConnection {
    channel: TransferChannel,
    address: String,
    protocol: TransferProtocol,
    limits: TransferLimits,
    busy_polls: bool,
    poller: AdaptivePoller,
    cpu_spreader: CpuSpreader,
}

impl TransferConnection {
    /// Connects to a node's data plane.
    ///
    /// # Errors
    /// [`TransferError::Connect`].
    pub async fn open(
        host: &str,
        port: u16,
        protocol: TransferProtocol,
        limits: TransferLimits,
    ) -> Result<Self, TransferError> {
        Self::open_on(host, port, protocol, limits, None).await
    }

    /// Connects to the data plane of a node that requires TLS. Each transfer needs a capability, see [`TransferConnection::set_capability`].
    ///
    /// # Errors
    /// [`TransferError::Connect`].
    pub async fn open_secured(
        host: &str,
        port: u16,
        limits: TransferLimits,
        tls: &PeerTls,
    ) -> Result<Self, TransferError> {
        Self::open_on(host, port, TransferProtocol::Checked, limits, Some(tls)).await
    }

    async fn open_on(
        host: &str,
        port: u16,
        protocol: TransferProtocol,
        limits: TransferLimits,
        tls: Option<&PeerTls>,
    ) -> Result<Self, TransferError> {
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let opened = open_channel(host, port, limits, tls).await;
        let (channel, cpu_spreader) =
            opened.map_err(|source| TransferError::Connect { address: address.clone(), source })?;
        let poller = AdaptivePoller::for_process(limits.busy_poll);
        Ok(Self { channel, address, protocol, limits, busy_polls: false, poller, cpu_spreader })
    }

    /// Sets the capability for the transfers that follow; without one they fail. Connections without TLS send none.
    pub fn set_capability(&mut self, capability: Option<Capability>) {
        if let TransferChannel::Secured(secured) = &mut self.channel {
            secured.capability = capability;
        }
    }

    /// Address of the node's data plane, as `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Protocol of this connection, fixed when it was opened.
    #[must_use]
    pub fn protocol(&self) -> TransferProtocol {
        self.protocol
    }

    /// Enables busy polling while reading, for threads that have no other work.
    pub fn set_busy_poll(&mut self, enabled: bool) {
        self.busy_polls = enabled;
    }

    /// Whether the peer has closed the connection or sent unrequested bytes. Check it before reusing an idle connection.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.channel.is_stale()
    }

    /// Whether the own certificate was renewed after the TLS handshake. The node then rejects capabilities issued for the new certificate.
    #[must_use]
    pub fn is_of_old_certificate(&self) -> bool {
        self.channel.is_of_old_certificate()
    }

    /// Reads the node's memory from `start` on. On failure `into` may be partly overwritten.
    ///
    /// # Errors
    /// [`TransferError`].
    pub async fn read(&mut self, start: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.read_ranges(start, &mut [into], |_| ()).await
    }

    /// As [`TransferConnection::read`], into several ranges of memory, one after another. `observer` is called with all bytes in order,
    /// while they are still in the core's cache.
    ///
    /// # Errors
    /// [`TransferError`].
    pub async fn read_ranges(
        &mut self,
        start: u64,
        into: &mut [&mut [u8]],
        observer: impl FnMut(&[u8]),
    ) -> Result<(), TransferError> {
        let length: usize = into.iter().map(|range| range.len()).sum();
        let size = length as u64;
        self.spread_cpu(length);
        self.send(start, size, TransferOperation::Read, &[]).await?;
        if self.protocol != TransferProtocol::V1 {
            self.status(start, size).await?;
        }
        let crc = self.receive(into, observer).await?;
        if self.protocol == TransferProtocol::Checked {
            let mut trailer = [0; STATUS];
            self.fill(&mut trailer).await?;
            if plane::checksum(trailer) != Some(crc) {
                return Err(self.damaged(start, size));
            }
        }
        Ok(())
    }

    /// Writes the node's memory from `start` on. With [`TransferProtocol::V1`] the write is not acknowledged.
    ///
    /// # Errors
    /// [`TransferError`].
    pub async fn write(&mut self, start: u64, from: &[u8]) -> Result<(), TransferError> {
        self.write_ranges(start, &[from]).await
    }

    /// As [`TransferConnection::write`], from several ranges of memory, one after another.
    ///
    /// # Errors
    /// [`TransferError`].
    pub async fn write_ranges(&mut self, start: u64, from: &[&[u8]]) -> Result<(), TransferError> {
        let size = from.iter().map(|range| range.len() as u64).sum();
        let sent = self.send(start, size, TransferOperation::Write, from).await;
        match (self.protocol, sent) {
            (TransferProtocol::V1, sent) => sent,
            (_, Ok(())) => self.status(start, size).await,
            // A node that rejects a write sends a status before it closes the connection.
            (_, Err(error @ TransferError::NotGranted { .. })) => Err(error),
            (_, Err(error)) => Err(match self.status(start, size).await {
                Err(refused @ (TransferError::Rejected { .. } | TransferError::Refused { .. })) => refused,
                _ => error,
            }),
        }
    }

    /// Sends a request with its body, and the checksum if the protocol has one.
    async fn send(
        &mut self,
        start: u64,
        size: u64,
        operation: TransferOperation,
        body: &[&[u8]],
    ) -> Result<(), TransferError> {
        let header = TransferHeader { size, address: start, operation, protocol: self.protocol }.encode();
        let mut head = [0; HEADER + CAPABILITY];
        head[..HEADER].copy_from_slice(&header);
        let head = match &self.channel {
            TransferChannel::Plain(_) => &head[..HEADER],
            TransferChannel::Secured(secured) => {
                let capability = secured.capability.ok_or_else(|| self.not_granted(start, size))?;
                head[HEADER..].copy_from_slice(&capability.encode());
                &head[..]
            }
        };
        let checked = self.protocol == TransferProtocol::Checked && operation == TransferOperation::Write;
        let trailer = plane::trailer(if checked { body_checksum(body) } else { 0 });
        let trailer = if checked { &trailer[..] } else { &[] };
        let ranges = [head].into_iter().chain(body.iter().copied()).chain([trailer]);
        let mut ranges: Vec<IoSlice<'_>> =
            ranges.filter(|range| !range.is_empty()).map(IoSlice::new).collect();
        self.send_ranges(&mut ranges).await
    }

    pub(crate) async fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        self.send_ranges(&mut [IoSlice::new(bytes)]).await
    }

    async fn send_ranges(&mut self, ranges: &mut [IoSlice<'_>]) -> Result<(), TransferError> {
        let mut unsent = ranges;
        while !unsent.is_empty() {
            let next = &unsent[..unsent.len().min(RANGES_PER_CALL)];
            let written = timed(self.limits.stall, self.channel.write_vectored(next)).await;
            match written.map_err(|error| self.failed(error))? {
                0 => return Err(self.failed(io::ErrorKind::WriteZero.into())),
                bytes => IoSlice::advance_slices(&mut unsent, bytes),
            }
        }
        // TLS may buffer records; a plain socket does not.
        if let TransferChannel::Secured(secured) = &mut self.channel {
            let flushed = timed(self.limits.stall, secured.flush()).await;
            flushed.map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    fn spread_cpu(&mut self, bytes: usize) {
        if let Some(stream) = self.channel.plain() {
            self.cpu_spreader.spread_if_colocated(stream, bytes);
        }
    }

    /// Receives a body and returns its checksum, 0 if the protocol has none.
    async fn receive(
        &mut self,
        into: &mut [&mut [u8]],
        mut observer: impl FnMut(&[u8]),
    ) -> Result<u32, TransferError> {
        let checked = self.protocol == TransferProtocol::Checked;
        let mut crc = Digest::new(CrcAlgorithm::Crc32Iscsi);
        let mut following: usize = into.iter().map(|range| range.len()).sum();
        for range in into {
            following -= range.len();
            let observe = |bytes: &[u8]| {
                if checked {
                    crc.update(bytes);
                }
                observer(bytes);
            };
            self.receive_range(range, following, observe).await?;
        }
        // CRC-32C fills the lower half; the upper half is for longer checksums.
        Ok(crc.finalize() as u32)
    }

    /// Receives one range of a body, of which `following` bytes come after it.
    async fn receive_range(
        &mut self,
        into: &mut [u8],
        following: usize,
        mut observer: impl FnMut(&[u8]),
    ) -> Result<(), TransferError> {
        let (mut filled, mut observed) = (0, 0);
        while filled < into.len() {
            filled += self.receive_some(&mut into[filled..]).await?;
            if filled - observed >= CHECKSUM_CHUNK || filled == into.len() {
                observer(&into[observed..filled]);
                observed = filled;
                // Without busy polling, transfers over other connections run too, and they would push each other from core to core.
                if self.busy_polls {
                    self.spread_cpu(into.len() - filled + following);
                }
            }
        }
        Ok(())
    }

    pub(crate) async fn fill(&mut self, into: &mut [u8]) -> Result<(), TransferError> {
        let mut filled = 0;
        while filled < into.len() {
            filled += self.receive_some(&mut into[filled..]).await?;
        }
        Ok(())
    }

    /// Receives at least one byte, busy-polling first where enabled.
    async fn receive_some(&mut self, into: &mut [u8]) -> Result<usize, TransferError> {
        let read = match self.receive_polling(into) {
            Ok(None) => timed(self.limits.stall, self.channel.read(into)).await,
            received => received.map(Option::unwrap_or_default),
        };
        match read {
            Ok(0) => Err(self.failed(io::ErrorKind::UnexpectedEof.into())),
            Ok(bytes) => Ok(bytes),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn receive_polling(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(stream) = self.channel.plain().filter(|_| self.busy_polls && self.poller.is_due()) else {
            return Ok(None);
        };
        self.poller.poll(|| try_receive(stream, into))
    }

    pub(crate) async fn status(&mut self, start: u64, size: u64) -> Result<(), TransferError> {
        match self.receive_status(start, size).await? {
            TransferStatus::Ok => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Receives the status of a request that was not rejected.
    pub(crate) async fn receive_status(
        &mut self,
        start: u64,
        size: u64,
    ) -> Result<TransferStatus, TransferError> {
        let mut status = [0; STATUS];
        let filled = self.fill(&mut status).await;
        // A TLS alert is shorter than a status, so check for it before `filled`.
        if self.channel.plain().is_some() && is_tls_alert(&status) {
            return Err(self.broken(BrokenConnectionError::TlsRequired));
        }
        filled?;
        match TransferStatus::decode(status) {
            Ok(TransferStatus::Rejected) => {
                Err(TransferError::Rejected { address: self.address.clone(), start, size })
            }
            Ok(TransferStatus::Damaged) => Err(self.damaged(start, size)),
            Ok(TransferStatus::Refused(refusal)) => {
                Err(TransferError::Refused { address: self.address.clone(), start, size, refusal })
            }
            Ok(status @ (TransferStatus::Ok | TransferStatus::OkWithoutReceipt)) => Ok(status),
            Ok(other @ TransferStatus::Other(_)) => Err(self.unexpected(other)),
            Err(error) => Err(self.broken(error.into())),
        }
    }

    fn broken(&self, source: BrokenConnectionError) -> TransferError {
        TransferError::Broken { address: self.address.clone(), source }
    }

    /// A status that the protocol does not have at this place.
    pub(crate) fn unexpected(&self, status: TransferStatus) -> TransferError {
        self.broken(BrokenConnectionError::UnknownStatus(status.code()))
    }

    fn not_granted(&self, start: u64, size: u64) -> TransferError {
        TransferError::NotGranted { address: self.address.clone(), start, size }
    }

    pub(crate) fn damaged(&self, start: u64, size: u64) -> TransferError {
        TransferError::Checksum { address: self.address.clone(), start, size }
    }

    pub(crate) fn failed(&self, error: io::Error) -> TransferError {
        let address = self.address.clone();
        match error.kind() {
            io::ErrorKind::TimedOut => TransferError::TimedOut { address, limit: self.limits.stall },
            _ => TransferError::Broken { address, source: error.into() },
        }
    }
}

/// Connects, and performs the TLS handshake if `tls` is given.
async fn open_channel(
    host: &str,
    port: u16,
    limits: TransferLimits,
    tls: Option<&PeerTls>,
) -> Result<(TransferChannel, CpuSpreader), TransferConnectError> {
    let connecting = tokio::time::timeout(limits.connect, TcpStream::connect((host, port)));
    let stream = connecting.await.map_err(|_| TransferConnectError::TimedOut(limits.connect))??;
    set_options(&stream, limits)?;
    let cpu_spreader = CpuSpreader::new(&stream);
    let channel = match tls {
        None => TransferChannel::Plain(stream),
        Some(tls) => timed(limits.connect, TransferChannel::secure(stream, host, tls)).await?,
    };
    Ok((channel, cpu_spreader))
}

fn set_options(stream: &TcpStream, limits: TransferLimits) -> io::Result<()> {
    stream.set_nodelay(true)?;
    limits.kernel_buffer.map_or(Ok(()), |bytes| set_kernel_buffer(stream, bytes))
}

#[cfg(not(feature = "simulation"))]
fn set_kernel_buffer(stream: &TcpStream, bytes: usize) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_recv_buffer_size(bytes)?;
    socket.set_send_buffer_size(bytes)
}

/// Simulated sockets have no kernel buffers.
#[cfg(feature = "simulation")]
fn set_kernel_buffer(_: &TcpStream, _: usize) -> io::Result<()> {
    Ok(())
}

async fn timed<T>(limit: Duration, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(limit, step).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// The CRC-32C of a body.
fn body_checksum(body: &[&[u8]]) -> u32 {
    let mut crc = Digest::new(CrcAlgorithm::Crc32Iscsi);
    body.iter().for_each(|range| crc.update(range));
    // It fills the lower half.
    crc.finalize() as u32
}
