//! Peers that violate the protocol. None of them may affect other peers.

use std::time::Duration;

use moongate_transfer::TransferProtocol;
use moongate_transfer::plane::trailer;
use moongate_transfer::serve::TransferServerOptions;

use crate::node::{BASE, LIMIT, SIZE, TestTransferNode, content, wait_until};

fn short_timeouts() -> TransferServerOptions {
    TransferServerOptions {
        stall: Duration::from_millis(50),
        slowest: u64::MAX,
        ..TransferServerOptions::default()
    }
}

#[tokio::test]
async fn invalid_headers_end_the_connection() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    for operation in [2_u8, 0x40, 0x41, 0x82, 0xff] {
        let mut raw = node.connect_raw().await;
        let mut header = [0; 24];
        header[16] = operation;
        raw.send(&header).await;
        assert!(raw.read_to_end().await.is_empty());
    }
    let mut raw = node.connect_raw().await;
    raw.send(b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n").await;
    assert!(raw.read_to_end().await.is_empty());
    let counts = || node.server.counts().snapshot();
    wait_until(|| counts().malformed + counts().rejected == 6).await;
}

#[tokio::test]
async fn ranges_out_of_bounds_are_rejected_at_once() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    for (start, size) in
        [(BASE, u64::MAX), (u64::MAX, 1), (u64::MAX, u64::MAX), (BASE, SIZE as u64 + 1), (BASE, 0), (0, 0)]
    {
        for writes in [true, false] {
            let mut raw = node.raw(TransferProtocol::V2, writes, start, size).await;
            assert_eq!(raw.status().await, Some(1), "{size} bytes at {start:#x}");
            assert!(raw.read_to_end().await.is_empty());
            assert!(node.raw(TransferProtocol::V1, writes, start, size).await.read_to_end().await.is_empty());
        }
    }
}

#[tokio::test]
async fn stalled_peers_are_disconnected() {
    let node = TestTransferNode::start(short_timeouts()).await;
    let mut half_header = node.connect_raw().await;
    half_header.send(&[1; 23]).await;
    let mut half_body = node.raw(TransferProtocol::V2, true, BASE, 1000).await;
    half_body.send(&[1; 999]).await;
    // Requests more than the kernel buffers, and reads none of it.
    let unread = node.raw(TransferProtocol::V1, false, BASE, SIZE as u64).await;
    let mut neighbour = node.connect(TransferProtocol::Checked).await;
    neighbour.write(BASE + 5000, b"undisturbed").await.unwrap();
    assert!(half_header.read_to_end().await.is_empty());
    assert!(half_body.read_to_end().await.is_empty());
    wait_until(|| node.server.counts().snapshot().failed == 3).await;
    assert!(unread.read_to_end().await.len() < SIZE);
    let mut read = [0; 11];
    neighbour.read(BASE + 5000, &mut read).await.unwrap();
    assert_eq!(&read, b"undisturbed");
    wait_until(|| node.server.open() == 1).await;
}

#[tokio::test]
async fn slow_senders_are_disconnected() {
    let node = TestTransferNode::start(TransferServerOptions {
        stall: Duration::from_millis(300),
        ..short_timeouts()
    })
    .await;
    let mut slow = node.raw(TransferProtocol::V2, true, BASE, SIZE as u64).await;
    // Sends more often than the stall limit, but for longer than the whole transfer may take.
    let sends = async {
        loop {
            slow.send(&[0; 100]).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = sends => {}
        () = wait_until(|| node.server.counts().snapshot().failed == 1) => {}
    }
}

#[tokio::test]
async fn idle_connections_stay_open_between_transfers() {
    let node = TestTransferNode::start(short_timeouts()).await;
    let mut connection = node.connect(TransferProtocol::V2).await;
    connection.write(BASE, b"first").await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    connection.write(BASE, b"other").await.unwrap();
}

#[tokio::test]
async fn one_peer_cannot_take_all_connections() {
    let node = TestTransferNode::start(TransferServerOptions {
        connections_per_peer: 3,
        ..TransferServerOptions::default()
    })
    .await;
    let mut connections = Vec::new();
    for _ in 0..3 {
        let mut connection = node.connect(TransferProtocol::V2).await;
        connection.write(BASE, b"x").await.unwrap();
        connections.push(connection);
    }
    assert!(node.connect(TransferProtocol::V2).await.write(BASE, b"x").await.is_err());
    assert_eq!(node.server.counts().snapshot().over_limit, 1);
    connections.pop();
    wait_until(|| node.server.open() == 2).await;
    node.connect(TransferProtocol::V2).await.write(BASE, b"x").await.unwrap();
}

#[tokio::test]
async fn silent_connections_are_evicted_at_the_limit() {
    const SILENT: usize = 140;
    let node = TestTransferNode::start(TransferServerOptions {
        connections: SILENT,
        ..TransferServerOptions::default()
    })
    .await;
    let mut busy = node.connect(TransferProtocol::V2).await;
    busy.write(BASE, b"x").await.unwrap();
    let mut silent = Vec::new();
    for _ in 1..SILENT {
        silent.push(node.connect_raw().await);
    }
    wait_until(|| node.server.open() == SILENT).await;
    // A connection can be evicted after one second without a request.
    let written = async {
        while node.connect(TransferProtocol::V2).await.write(BASE, b"y").await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LIMIT, written).await.unwrap();
    assert_eq!(node.server.counts().snapshot().evicted, 1);
    // Connections with requests stay.
    busy.write(BASE, b"z").await.unwrap();
}

#[tokio::test]
async fn addresses_not_allowed_are_rejected() {
    let node = TestTransferNode::start(TransferServerOptions {
        peers: "10.0.0.0/8".parse().unwrap(),
        ..TransferServerOptions::default()
    })
    .await;
    assert!(node.connect(TransferProtocol::V2).await.write(BASE, b"x").await.is_err());
    assert_eq!(node.server.counts().snapshot().not_allowed, 1);
    assert_eq!(node.server.open(), 0);
}

#[tokio::test]
async fn corrupt_bodies_are_rejected_and_can_be_retried() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    let bytes = content(1000, 3);
    let mut raw = node.raw(TransferProtocol::Checked, true, BASE, 1000).await;
    raw.send(&bytes).await;
    raw.send(&trailer(crc_fast::crc32_iscsi(&bytes) ^ 1)).await;
    assert_eq!(raw.status().await, Some(2));
    assert_eq!(node.server.counts().snapshot().damaged, 1);
    // The connection stays usable, and a second attempt may succeed.
    raw.send(
        &moongate_transfer::plane::TransferHeader {
            size: 1000,
            address: BASE,
            operation: moongate_transfer::plane::TransferOperation::Write,
            protocol: TransferProtocol::Checked,
        }
        .encode(),
    )
    .await;
    raw.send(&bytes).await;
    raw.send(&trailer(crc_fast::crc32_iscsi(&bytes))).await;
    assert_eq!(raw.status().await, Some(0));
    assert_eq!(node.memory.bytes_at(0, 1000), bytes);
}
