//! A node with memory that is a vector, and peers that say what they like.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::TcpStream as Socket;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moongate_runtime::Supervisor;
use moongate_transfer::plane::{Header, Operation, Status};
use moongate_transfer::serve::{self, Options, Serving, Span, Target};
use moongate_transfer::{Connection, Limits, Protocol, TransferError};
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

pub(crate) struct Memory {
    bytes: Mutex<Vec<u8>>,
    checksums: Mutex<HashMap<(u64, u64), u32>>,
    begun: AtomicUsize,
    finished: AtomicUsize,
}

impl Memory {
    pub(crate) fn damage(&self, at: usize) {
        self.bytes.lock()[at] ^= 1;
    }

    /// Waits until a write is in progress.
    pub(crate) async fn begun(&self) {
        until(|| self.begun.load(Ordering::SeqCst) > self.finished.load(Ordering::SeqCst)).await;
    }

    pub(crate) fn at(&self, offset: usize, size: usize) -> Vec<u8> {
        self.bytes.lock()[offset..offset + size].to_vec()
    }

    fn move_in(&self, mut socket: &Socket, span: Span) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; span.size as usize];
        socket.read_exact(&mut bytes)?;
        let from = (span.start - BASE) as usize;
        self.bytes.lock()[from..from + bytes.len()].copy_from_slice(&bytes);
        Ok(bytes)
    }

    fn move_out(&self, mut socket: &Socket, span: Span) -> io::Result<Vec<u8>> {
        let bytes = self.at((span.start - BASE) as usize, span.size as usize);
        socket.write_all(&bytes)?;
        Ok(bytes)
    }
}

impl Target for Memory {
    fn contains(&self, span: Span) -> bool {
        span.start >= BASE && span.start + span.size <= BASE + SIZE as u64
    }

    fn readable(&self, _: Span) -> bool {
        true
    }

    fn receive(
        &self,
        socket: &Socket,
        span: Span,
        summed: bool,
        whole: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let end = span.start + span.size;
        self.checksums.lock().retain(|(start, size), _| *start >= end || start + size <= span.start);
        self.begun.fetch_add(1, Ordering::SeqCst);
        let bytes = self.move_in(socket, span)?;
        let crc = summed.then(|| crc_fast::crc32_iscsi(&bytes));
        let is_whole = whole(crc)?;
        if let Some(crc) = crc.filter(|_| is_whole) {
            self.checksums.lock().insert((span.start, span.size), crc);
        }
        self.finished.fetch_add(1, Ordering::SeqCst);
        Ok(is_whole)
    }

    fn send(&self, socket: &Socket, span: Span) -> io::Result<()> {
        self.move_out(socket, span).map(|_| ())
    }

    fn send_summed(&self, socket: &Socket, span: Span) -> io::Result<u32> {
        self.move_out(socket, span).map(|bytes| crc_fast::crc32_iscsi(&bytes))
    }

    fn receive_from(
        &self,
        source: &mut dyn Read,
        span: Span,
        whole: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let mut bytes = vec![0; span.size as usize];
        source.read_exact(&mut bytes)?;
        let from = (span.start - BASE) as usize;
        self.bytes.lock()[from..from + bytes.len()].copy_from_slice(&bytes);
        let is_whole = whole(source, crc_fast::crc32_iscsi(&bytes))?;
        self.finished.fetch_add(1, Ordering::SeqCst);
        Ok(is_whole)
    }

    fn send_to(&self, sink: &mut dyn Write, span: Span) -> io::Result<u32> {
        let bytes = self.at((span.start - BASE) as usize, span.size as usize);
        sink.write_all(&bytes)?;
        Ok(crc_fast::crc32_iscsi(&bytes))
    }

    fn checksum(&self, span: Span) -> Option<u32> {
        self.checksums.lock().get(&(span.start, span.size)).copied()
    }
}

/// A node that serves.
pub(crate) struct Node {
    pub(crate) memory: Arc<Memory>,
    pub(crate) serving: Serving,
    pub(crate) port: u16,
    _supervisor: Supervisor,
}

impl Node {
    pub(crate) async fn start(options: Options) -> Self {
        Self::start_at("127.0.0.1", options).await
    }

    pub(crate) async fn start_at(host: &str, options: Options) -> Self {
        let supervisor = Supervisor::new();
        let listener = TcpListener::bind((host, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let memory = Arc::new(Memory {
            bytes: Mutex::new(vec![0; SIZE]),
            checksums: Mutex::default(),
            begun: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
        });
        let target: Arc<dyn Target> = Arc::<Memory>::clone(&memory);
        let serving = serve::listen(listener, target, options, &supervisor).unwrap();
        Self { memory, serving, port, _supervisor: supervisor }
    }

    pub(crate) async fn dial(&self, protocol: Protocol) -> Result<Connection, TransferError> {
        Connection::open("127.0.0.1", self.port, protocol, Limits { stall: LIMIT, ..Limits::default() }).await
    }

    pub(crate) async fn connect(&self, protocol: Protocol) -> Connection {
        self.dial(protocol).await.unwrap()
    }

    /// A connection of which the test says every byte.
    pub(crate) async fn stranger(&self) -> Raw {
        Raw(TcpStream::connect(("127.0.0.1", self.port)).await.unwrap())
    }

    /// One that has sent a header.
    pub(crate) async fn raw(&self, protocol: Protocol, writes: bool, address: u64, size: u64) -> Raw {
        let operation = if writes { Operation::Write } else { Operation::Read };
        let mut raw = self.stranger().await;
        raw.send(&Header { size, address, operation, protocol }.encode()).await;
        raw
    }
}

pub(crate) struct Raw(TcpStream);

impl Raw {
    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    /// The code of the next status; nothing if the connection ends instead.
    pub(crate) async fn status(&mut self) -> Option<u32> {
        let mut bytes = [0; 8];
        let read = tokio::time::timeout(LIMIT, self.0.read_exact(&mut bytes)).await.unwrap();
        read.ok()?;
        Some(match Status::decode(bytes).unwrap() {
            Status::Ok => 0,
            Status::Rejected => 1,
            Status::Damaged => 2,
            Status::Refused(_) => unreachable!("nothing is refused without certificates"),
            Status::Other(code) => code,
        })
    }

    /// Waits until the node closes the connection; returns what came before.
    pub(crate) async fn rest(mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        // A reset is an end too.
        let _ = tokio::time::timeout(LIMIT, self.0.read_to_end(&mut rest)).await.unwrap();
        rest
    }
}
