//! A node with memory that is a vector, and peers that say what they like.

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

/// Long, because it only says when a test hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
pub(crate) const BASE: u64 = 0x10_0000_0000;
pub(crate) const SIZE: usize = 10 << 20;

/// Bytes that differ from those of another seed.
pub(crate) fn content(size: usize, seed: u64) -> Vec<u8> {
    (0..size as u64).map(|at| (at * 31 + at / 257 + seed * 101) as u8).collect()
}

/// Waits until something is so.
pub(crate) async fn until(mut so: impl FnMut() -> bool) {
    let waited = async {
        while !so() {
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
    pub(crate) fn damage(&self, at: usize) {
        self.bytes.lock()[at] ^= 1;
    }

    /// Waits until a write is in progress.
    pub(crate) async fn wait_transfer_started(&self) {
        until(|| self.started.load(Ordering::SeqCst) > self.finished.load(Ordering::SeqCst)).await;
    }

    pub(crate) fn bytes_at(&self, offset: usize, size: usize) -> Vec<u8> {
        self.bytes.lock()[offset..offset + size].to_vec()
    }

    fn move_in(&self, mut socket: &Socket, span: AddressRange) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; span.size as usize];
        socket.read_exact(&mut bytes)?;
        let from = (span.start - BASE) as usize;
        self.bytes.lock()[from..from + bytes.len()].copy_from_slice(&bytes);
        Ok(bytes)
    }

    fn move_out(&self, mut socket: &Socket, span: AddressRange) -> io::Result<Vec<u8>> {
        let bytes = self.bytes_at((span.start - BASE) as usize, span.size as usize);
        socket.write_all(&bytes)?;
        Ok(bytes)
    }
}

impl TransferTarget for TestMemory {
    fn contains(&self, span: AddressRange) -> bool {
        span.start >= BASE && span.start + span.size <= BASE + SIZE as u64
    }

    fn is_readable(&self, _: AddressRange) -> bool {
        true
    }

    fn receive(
        &self,
        socket: &Socket,
        span: AddressRange,
        summed: bool,
        whole: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let end = span.start + span.size;
        self.checksums.lock().retain(|(start, size), _| *start >= end || start + size <= span.start);
        self.started.fetch_add(1, Ordering::SeqCst);
        let bytes = self.move_in(socket, span)?;
        let crc = summed.then(|| crc_fast::crc32_iscsi(&bytes));
        let is_whole = whole(crc)?;
        if let Some(crc) = crc.filter(|_| is_whole) {
            self.checksums.lock().insert((span.start, span.size), crc);
        }
        self.finished.fetch_add(1, Ordering::SeqCst);
        Ok(is_whole)
    }

    fn send(&self, socket: &Socket, span: AddressRange) -> io::Result<()> {
        self.move_out(socket, span).map(|_| ())
    }

    fn send_summed(&self, socket: &Socket, span: AddressRange) -> io::Result<u32> {
        self.move_out(socket, span).map(|bytes| crc_fast::crc32_iscsi(&bytes))
    }

    fn receive_from(
        &self,
        source: &mut dyn Read,
        span: AddressRange,
        whole: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool> {
        self.started.fetch_add(1, Ordering::SeqCst);
        let mut bytes = vec![0; span.size as usize];
        source.read_exact(&mut bytes)?;
        let from = (span.start - BASE) as usize;
        self.bytes.lock()[from..from + bytes.len()].copy_from_slice(&bytes);
        let is_whole = whole(source, crc_fast::crc32_iscsi(&bytes))?;
        self.finished.fetch_add(1, Ordering::SeqCst);
        Ok(is_whole)
    }

    fn send_to(&self, sink: &mut dyn Write, span: AddressRange) -> io::Result<u32> {
        let bytes = self.bytes_at((span.start - BASE) as usize, span.size as usize);
        sink.write_all(&bytes)?;
        Ok(crc_fast::crc32_iscsi(&bytes))
    }

    fn checksum(&self, span: AddressRange) -> Option<u32> {
        self.checksums.lock().get(&(span.start, span.size)).copied()
    }
}

/// A node that serves.
pub(crate) struct TestTransferNode {
    pub(crate) memory: Arc<TestMemory>,
    pub(crate) serving: TransferServer,
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
        let serving = serve::listen(listener, target, options, &supervisor).unwrap();
        Self { memory, serving, port, _supervisor: supervisor }
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

    /// A connection of which the test says every byte.
    pub(crate) async fn connect_raw(&self) -> RawTransferPeer {
        RawTransferPeer(TcpStream::connect(("127.0.0.1", self.port)).await.unwrap())
    }

    /// One that has sent a header.
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

    /// The code of the next status; nothing if the connection ends instead.
    pub(crate) async fn status(&mut self) -> Option<u32> {
        let mut bytes = [0; 8];
        let read = tokio::time::timeout(LIMIT, self.0.read_exact(&mut bytes)).await.unwrap();
        read.ok()?;
        Some(match TransferStatus::decode(bytes).unwrap() {
            TransferStatus::Ok => 0,
            TransferStatus::Rejected => 1,
            TransferStatus::Damaged => 2,
            TransferStatus::Refused(_) => unreachable!("nothing is refused without certificates"),
            TransferStatus::Other(code) => code,
        })
    }

    /// Waits until the node closes the connection; returns what came before.
    pub(crate) async fn read_to_end(mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        // A reset is an end too.
        let _ = tokio::time::timeout(LIMIT, self.0.read_to_end(&mut rest)).await.unwrap();
        rest
    }
}
