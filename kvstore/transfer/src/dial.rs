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
use crate::plane::{
    self, HEADER, STATUS, TransferHeader, TransferOperation, TransferProtocol, TransferStatus,
};

/// Bytes per checksum update, small enough that bytes just copied are still in the core's cache.
const CHECKSUM_CHUNK: usize = 256 << 10;

/// Timeouts and buffer sizes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferLimits {
    /// Timeout for connecting and the TLS handshake.
    pub connect: Duration,
    /// Maximum time without progress of at least one byte.
    pub stall: Duration,
    /// Kernel socket buffer in bytes for each direction. With `None` the kernel chooses; it may grant less than requested.
    pub kernel_buffer: Option<usize>,
    /// Busy-poll time for expected bytes on connections with [`TransferConnection::set_busy_poll`]; zero disables it.
    pub busy_poll: Duration,
}

impl Default for TransferLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            stall: Duration::from_secs(10),
            kernel_buffer: None,
            busy_poll: Duration::ZERO,
        }
    }
}

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
        self.read_with(start, into, |_| ()).await
    }

    /// As [`TransferConnection::read`]. `observer` is called with all bytes in order, while they are still in the core's cache.
    ///
    /// # Errors
    /// [`TransferError`].
    pub async fn read_with(
        &mut self,
        start: u64,
        into: &mut [u8],
        observer: impl FnMut(&[u8]),
    ) -> Result<(), TransferError> {
        let size = into.len() as u64;
        self.spread_cpu(into.len());
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
        let size = from.len() as u64;
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
        body: &[u8],
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
        let crc = if checked { crc_fast::crc32_iscsi(body) } else { 0 };
        let trailer = plane::trailer(crc);
        let trailer = if checked { &trailer[..] } else { &[] };
        let total = head.len() + body.len() + trailer.len();
        let mut sent = 0;
        while sent < total {
            let parts = remaining_slices([head, body, trailer], sent);
            let written = timed(self.limits.stall, self.channel.write_vectored(&parts)).await;
            match written.map_err(|error| self.failed(error))? {
                0 => return Err(self.failed(io::ErrorKind::WriteZero.into())),
                bytes => sent += bytes,
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
        into: &mut [u8],
        mut observer: impl FnMut(&[u8]),
    ) -> Result<u32, TransferError> {
        let (mut filled, mut summed, mut crc) = (0, 0, Digest::new(CrcAlgorithm::Crc32Iscsi));
        let checked = self.protocol == TransferProtocol::Checked;
        while filled < into.len() {
            filled += self.receive_some(&mut into[filled..]).await?;
            if filled - summed >= CHECKSUM_CHUNK || filled == into.len() {
                if checked {
                    crc.update(&into[summed..filled]);
                }
                observer(&into[summed..filled]);
                summed = filled;
                // Without busy polling, transfers over other connections run too, and they would push each other from core to core.
                if self.busy_polls {
                    self.spread_cpu(into.len() - filled);
                }
            }
        }
        // CRC-32C fills the lower half; the upper half is for longer checksums.
        Ok(crc.finalize() as u32)
    }

    async fn fill(&mut self, into: &mut [u8]) -> Result<(), TransferError> {
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

    async fn status(&mut self, start: u64, size: u64) -> Result<(), TransferError> {
        let mut status = [0; STATUS];
        let filled = self.fill(&mut status).await;
        let broken =
            |source: BrokenConnectionError| TransferError::Broken { address: self.address.clone(), source };
        // A TLS alert is shorter than a status, so check for it before `filled`.
        if self.channel.plain().is_some() && is_tls_alert(&status) {
            return Err(broken(BrokenConnectionError::TlsRequired));
        }
        filled?;
        match TransferStatus::decode(status) {
            Ok(TransferStatus::Ok) => Ok(()),
            Ok(TransferStatus::Rejected) => {
                Err(TransferError::Rejected { address: self.address.clone(), start, size })
            }
            Ok(TransferStatus::Damaged) => Err(self.damaged(start, size)),
            Ok(TransferStatus::Refused(refusal)) => {
                Err(TransferError::Refused { address: self.address.clone(), start, size, refusal })
            }
            Ok(TransferStatus::Other(code)) => Err(broken(BrokenConnectionError::UnknownStatus(code))),
            Err(error) => Err(broken(error.into())),
        }
    }

    fn not_granted(&self, start: u64, size: u64) -> TransferError {
        TransferError::NotGranted { address: self.address.clone(), start, size }
    }

    fn damaged(&self, start: u64, size: u64) -> TransferError {
        TransferError::Checksum { address: self.address.clone(), start, size }
    }

    fn failed(&self, error: io::Error) -> TransferError {
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

/// The slices that remain after `sent` bytes.
fn remaining_slices(parts: [&[u8]; 3], mut sent: usize) -> [IoSlice<'_>; 3] {
    parts.map(|part| {
        let skipped = sent.min(part.len());
        sent -= skipped;
        IoSlice::new(&part[skipped..])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_slices_skip_sent_bytes() {
        let parts: [&[u8]; 3] = [b"abc", b"de", b"f"];
        for (sent, rest) in [(0, "abcdef"), (2, "cdef"), (3, "def"), (5, "f"), (6, "")] {
            let left: Vec<u8> = remaining_slices(parts, sent).iter().flat_map(|part| part.to_vec()).collect();
            assert_eq!(left, rest.as_bytes(), "{sent}");
        }
    }
}
