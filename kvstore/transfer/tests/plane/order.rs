//! Reads concurrent with unacknowledged writes: a read returns everything that had arrived before it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream as Socket;
use std::time::Duration;

use moongate_transfer::plane::{TransferHeader, TransferOperation};
use moongate_transfer::serve::TransferServerOptions;
use moongate_transfer::{TransferError, TransferProtocol};

use crate::node::{BASE, LIMIT, SIZE, TestTransferNode, content, wait_until};

fn header(protocol: TransferProtocol, operation: TransferOperation, address: u64, size: usize) -> [u8; 24] {
    TransferHeader { size: size as u64, address, operation, protocol }.encode()
}

/// A peer whose writes return when the kernel has the bytes, as those of Mooncake's client do.
struct UnacknowledgedWriter(Socket);

impl UnacknowledgedWriter {
    fn connect(port: u16) -> Self {
        let socket = Socket::connect(("127.0.0.1", port)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_nodelay(true).unwrap();
        Self(socket)
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        self.0
            .write_all(&header(TransferProtocol::V1, TransferOperation::Write, address, bytes.len()))
            .unwrap();
        self.0.write_all(bytes).unwrap();
    }

    fn read(&mut self, protocol: TransferProtocol, address: u64, size: usize) -> Vec<u8> {
        self.0.write_all(&header(protocol, TransferOperation::Read, address, size)).unwrap();
        if protocol != TransferProtocol::V1 {
            self.0.read_exact(&mut [0; 8]).unwrap();
        }
        let mut bytes = vec![0; size];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }
}

/// Alternates writes and reads; returns how many reads returned wrong bytes.
fn wrong_reads(port: u16, lane: u64, rounds: u64) -> usize {
    let start = BASE + (lane << 20);
    let (mut pooled, mut reader) = (UnacknowledgedWriter::connect(port), UnacknowledgedWriter::connect(port));
    let mut wrong = 0;
    for round in 0..rounds {
        let size = if round % 2 == 0 { 1000 } else { 64 << 10 };
        let bytes = content(size, lane * 1000 + round);
        let mut once = None;
        match round % 3 {
            // A new connection per write, as clients up to 0.3.10 do.
            0 => once.insert(UnacknowledgedWriter::connect(port)).write(start, &bytes),
            // A pooled connection, with as many writes in a row as the kernel accepts.
            1 => pooled.write(start, &bytes),
            _ => {
                pooled.write(start + (64 << 10), &content(64 << 10, round));
                pooled.write(start, &bytes);
            }
        }
        let got = match round % 4 {
            0 => reader.read(TransferProtocol::V2, start, size),
            1 => UnacknowledgedWriter::connect(port).read(TransferProtocol::V2, start, size),
            _ => UnacknowledgedWriter::connect(port).read(TransferProtocol::V1, start, size),
        };
        wrong += usize::from(got != bytes);
    }
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_return_all_bytes_that_had_arrived() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    let port = node.port;
    let lanes = (0..8).map(|lane| tokio::task::spawn_blocking(move || wrong_reads(port, lane, 120)));
    let mut wrong = 0;
    for lane in lanes.collect::<Vec<_>>() {
        wrong += lane.await.unwrap();
    }
    assert_eq!(wrong, 0, "of 960 reads");
    assert_eq!(node.server.counts().snapshot().unfinished, 0);
}

#[tokio::test]
async fn a_read_waits_for_a_write_in_its_range_only() {
    let node = TestTransferNode::start(TransferServerOptions {
        write_wait: LIMIT,
        ..TransferServerOptions::default()
    })
    .await;
    let bytes = content(1000, 7);
    let mut writer = node.raw(TransferProtocol::V1, true, BASE, 1000).await;
    writer.send(&bytes[..10]).await;
    node.memory.wait_transfer_started().await;
    for protocol in [TransferProtocol::V1, TransferProtocol::V2, TransferProtocol::Checked] {
        node.connect(protocol).await.read(BASE + 1000, &mut [0; 50]).await.unwrap();
    }
    let (mut reader, mut got) = (node.connect(TransferProtocol::V2).await, vec![0; 1000]);
    let read = reader.read(BASE, &mut got);
    let rest = async {
        // Long enough for a read that does not wait.
        tokio::time::sleep(Duration::from_millis(50)).await;
        writer.send(&bytes[10..]).await;
    };
    let (read, ()) = tokio::join!(read, rest);
    read.unwrap();
    assert!(got == bytes, "the read did not wait");
    // The others may have waited for the ten bytes that had arrived.
    assert!((1..=4).contains(&node.server.counts().snapshot().delayed_reads));
}

#[tokio::test]
async fn a_read_of_an_incomplete_write_is_rejected() {
    let node = TestTransferNode::start(TransferServerOptions {
        write_wait: Duration::from_millis(50),
        ..TransferServerOptions::default()
    })
    .await;
    let mut stalled = node.raw(TransferProtocol::V1, true, BASE, 1000).await;
    stalled.send(&[1; 999]).await;
    node.memory.wait_transfer_started().await;
    let refused = node.connect(TransferProtocol::V2).await.read(BASE, &mut [0; 10]).await.unwrap_err();
    assert!(matches!(refused, TransferError::Rejected { .. }), "{refused}");
    assert!(node.connect(TransferProtocol::V1).await.read(BASE, &mut [0; 10]).await.is_err());
    wait_until(|| node.server.counts().snapshot().unfinished == 2).await;
    // When the writer has disconnected, the range is served as it is.
    drop(stalled);
    wait_until(|| node.server.counts().snapshot().failed == 1).await;
    node.connect(TransferProtocol::V2).await.read(BASE, &mut [0; 10]).await.unwrap();
}

#[tokio::test]
async fn incomplete_headers_and_bodies_do_not_delay_reads() {
    let node = TestTransferNode::start(TransferServerOptions {
        write_wait: LIMIT,
        ..TransferServerOptions::default()
    })
    .await;
    let mut half_header = node.connect_raw().await;
    half_header.send(&[0; 23]).await;
    // Reads nothing of a large response, so its connection is busy, and has sent no further request.
    let _unread = node.raw(TransferProtocol::V1, false, BASE, SIZE as u64).await;
    let mut half_body = node.raw(TransferProtocol::V1, true, BASE + 5000, 5000).await;
    half_body.send(&[1; 4000]).await;
    node.memory.wait_transfer_started().await;
    let mut reader = node.connect(TransferProtocol::V2).await;
    for _ in 0..10 {
        reader.read(BASE, &mut [0; 100]).await.unwrap();
    }
}

#[tokio::test]
async fn a_peer_that_ignores_its_response_delays_others_once() {
    let node = TestTransferNode::start(TransferServerOptions {
        write_wait: Duration::from_millis(50),
        ..TransferServerOptions::default()
    })
    .await;
    let mut eager = node.raw(TransferProtocol::V1, false, BASE, SIZE as u64).await;
    eager.send(&header(TransferProtocol::V1, TransferOperation::Write, BASE, 10)).await;
    let mut reader = node.connect(TransferProtocol::V2).await;
    for _ in 0..10 {
        reader.read(BASE + 100, &mut [0; 100]).await.unwrap();
    }
    assert_eq!(node.server.counts().snapshot().unfinished, 0);
}
