//! A node with a vector as memory, and raw peers that send arbitrary bytes.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::TcpStream as Socket;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moongate_runtime::Supervisor;
use moongate_transfer::plane::{TransferHeader, TransferOperation, TransferStatus};
use moongate_transfer::serve::{self, AddressRange, TransferServer, TransferServerOptions, TransferTarget};
use moongate_transfer::{TransferConnection, TransferError, TransferLimits, TransferProtocol};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Upper bound for waits; exceeded only when a test hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
pub(crate) const BASE: u64 = 0x10_0000_0000;
pub(crate) const SIZE: usize = 10 << 20;

/// Deterministic bytes that differ between seeds.
pub(crate) fn content(size: usize, seed: u64) -> Vec<u8> {
    (0..size as u64).map(|index| (index * 31 + index / 257 + seed * 101) as u8).collect()
}

/// Polls until `condition` holds; panics after [`LIMIT`].
pub(crate) async fn wait_until(mut condition: impl FnMut() -> bool) {
    let waited = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, waited).await.unwrap();
}

pub(crate) struct TestMemory {
    bytes: Mutex<Vec<u8>>,
    checksums: Mutex<HashMap<(u64, u64), u32>>,
    started: AtomicUsize,
    finished: AtomicUsize,
}

impl TestMemory {
    pub(crate) fn damage(&self, offset: usize) {
        self.bytes.lock()[offset] ^= 1;
    }

    /// Waits until a write is in progress.
    pub(crate) async fn wait_transfer_started(&self) {
        wait_until(|| self.started.load(Ordering::SeqCst) > self.finished.load(Ordering::SeqCst)).await;
    }

    pub(crate) fn bytes_at(&self, offset: usize, size: usize) -> Vec<u8> {
        self.bytes.lock()[offset..offset + size].to_vec()
    }

    fn move_in(&self, mut socket: &Socket, range: AddressRange) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; range.size as usize];
        socket.read_exact(&mut bytes)?;
        let from = (range.start - BASE) as usize;
        self.bytes.lock()[from..from + bytes.len()].copy_from_slice(&bytes);
        Ok(bytes)
    }

    fn move_out(&self, mut socket: &Socket, range: AddressRange) -> io::Result<Vec<u8>> {
        let bytes = self.bytes_at((range.start - BASE) as usize, range.size as usize);
        socket.write_all(&bytes)?;
        Ok(bytes)
    }
}

impl TransferTarget for TestMemory {
    fn contains(&self, range: AddressRange) -> bool {
        range.start >= BASE && range.start + range.size <= BASE + SIZE as u64
    }

    fn is_readable(&self, _: AddressRange) -> bool {
        true
    }

    fn receive(
        &self,
        socket: &Socket,
        range: AddressRange,
        summed: bool,
        verify: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let end = range.start + range.size;
        self.checksums.lock().retain(|(start, size), _| *start >= end || start + size <= range.start);
        self.started.fetch_add(1, Ordering::SeqCst);
        let bytes = self.move_in(socket, range)?;
        let crc = summed.then(|| crc_fast::crc32_iscsi(&bytes));
        let intact = verify(crc)?;
        if let Some(crc) = crc.filter(|_| intact) {
            self.checksums.lock().insert((range.start, range.size), crc);
        }
        self.finished.fetch_add(1, Ordering::SeqCst);
        Ok(intact)
    }

    fn send(&self, socket: &Socket, range: AddressRange) -> io::Result<()> {
        self.move_out(socket, range).map(|_| ())
    }

    fn send_summed(&self, socket: &Socket, range: AddressRange) -> io::Result<u32> {
        self.move_out(socket, range).map(|bytes| crc_fast::crc32_iscsi(&bytes))
    }

    fn receive_from(
        &self,
        source: &mut dyn Read,
        range: AddressRange,
        verify: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool> {
        self.started.fetch_add(1, Ordering::SeqCst);
        let mut bytes = vec![0; range.size as usize];
        source.read_exact(&mut bytes)?;
        let from = (range.start - BASE) as usize;
        self.bytes.lock()[from..from + bytes.len()].copy_from_slice(&bytes);
        let intact = verify(source, crc_fast::crc32_iscsi(&bytes))?;
        self.finished.fetch_add(1, Ordering::SeqCst);
        Ok(intact)
    }

    fn send_to(&self, sink: &mut dyn Write, range: AddressRange) -> io::Result<u32> {
        let bytes = self.bytes_at((range.start - BASE) as usize, range.size as usize);
        sink.write_all(&bytes)?;
        Ok(crc_fast::crc32_iscsi(&bytes))
    }

    fn checksum(&self, range: AddressRange) -> Option<u32> {
        self.checksums.lock().get(&(range.start, range.size)).copied()
    }
}

/// A running data plane server with its memory.
pub(crate) struct TestTransferNode {
    pub(crate) memory: Arc<TestMemory>,
    pub(crate) server: TransferServer,
    pub(crate) port: u16,
    _supervisor: Supervisor,
}

impl TestTransferNode {
    pub(crate) async fn start(options: TransferServerOptions) -> Self {
        Self::start_at("127.0.0.1", options).await
    }

    pub(crate) async fn start_at(host: &str, options: TransferServerOptions) -> Self {
        let supervisor = Supervisor::new();
        let listener = TcpListener::bind((host, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let memory = Arc::new(TestMemory {
            bytes: Mutex::new(vec![0; SIZE]),
            checksums: Mutex::default(),
            started: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
        });
        let target: Arc<dyn TransferTarget> = Arc::<TestMemory>::clone(&memory);
        let server = serve::listen(listener, target, options, &supervisor).unwrap();
        Self { memory, server, port, _supervisor: supervisor }
    }

    pub(crate) async fn dial(&self, protocol: TransferProtocol) -> Result<TransferConnection, TransferError> {
        TransferConnection::open(
            "127.0.0.1",
            self.port,
            protocol,
            TransferLimits { stall: LIMIT, ..TransferLimits::default() },
        )
        .await
    }

    pub(crate) async fn connect(&self, protocol: TransferProtocol) -> TransferConnection {
        self.dial(protocol).await.unwrap()
    }

    /// A raw connection: the test sends every byte itself.
    pub(crate) async fn connect_raw(&self) -> RawTransferPeer {
        RawTransferPeer(TcpStream::connect(("127.0.0.1", self.port)).await.unwrap())
    }

    /// A raw connection that has sent a header.
    pub(crate) async fn raw(
        &self,
        protocol: TransferProtocol,
        writes: bool,
        address: u64,
        size: u64,
    ) -> RawTransferPeer {
        let operation = if writes { TransferOperation::Write } else { TransferOperation::Read };
        let mut raw = self.connect_raw().await;
        raw.send(&TransferHeader { size, address, operation, protocol }.encode()).await;
        raw
    }
}

pub(crate) struct RawTransferPeer(TcpStream);

impl RawTransferPeer {
    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    /// The code of the next status; `None` if the connection ends instead.
    pub(crate) async fn status(&mut self) -> Option<u32> {
        let mut bytes = [0; 8];
        let read = tokio::time::timeout(LIMIT, self.0.read_exact(&mut bytes)).await.unwrap();
        read.ok()?;
        Some(match TransferStatus::decode(bytes).unwrap() {
            TransferStatus::Ok => 0,
            TransferStatus::Rejected => 1,
            TransferStatus::Damaged => 2,
            TransferStatus::Refused(_) => unreachable!("capabilities are rejected only over TLS"),
            TransferStatus::OkWithoutReceipt => 3,
            TransferStatus::Other(code) => code,
        })
    }

    /// Waits until the node closes the connection; returns the bytes received before.
    pub(crate) async fn read_to_end(mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        // A reset also ends the connection.
        let _ = tokio::time::timeout(LIMIT, self.0.read_to_end(&mut rest)).await.unwrap();
        rest
    }
}
