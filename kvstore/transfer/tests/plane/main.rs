//! Client and server of the data plane, with a vector as memory.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod hostile;
mod mapped;
mod node;
mod order;
mod secured;
mod vanished;

use std::time::Duration;

use moongate_transfer::serve::TransferServerOptions;
use moongate_transfer::{TransferError, TransferProtocol};

use node::{BASE, LIMIT, SIZE, TestTransferNode, content};

const ALL: [TransferProtocol; 3] = [TransferProtocol::V1, TransferProtocol::V2, TransferProtocol::Checked];

#[tokio::test]
async fn what_is_written_is_read_in_every_protocol() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    for (seed, protocol) in (0..).zip(ALL) {
        let mut connection = node.connect(protocol).await;
        for size in [1, 2, 4095, 65_536, 65_537, (4 << 20) + 1, 9 << 20] {
            let bytes = content(size, size as u64 + seed);
            let start = BASE + 17 + seed;
            connection.write(start, &bytes).await.unwrap();
            let mut read = vec![0; size];
            // On the same connection, a read sees earlier writes, although v1 does not acknowledge them.
            connection.read(start, &mut read).await.unwrap();
            assert!(read == bytes, "{protocol:?}, {size} bytes");
        }
    }
    let counts = node.server.counts().snapshot();
    assert_eq!((counts.reads, counts.writes), (21, 21));
    assert_eq!((counts.v1, counts.v2, counts.checked), (14, 14, 14));
    assert_eq!(counts.read_bytes, counts.written_bytes);
    assert_eq!((counts.failed, counts.rejected, counts.damaged), (0, 0, 0));
}

/// Cuts into ranges of 0 to 29,999 bytes: more than one system call can send.
fn lengths(total: usize) -> Vec<usize> {
    let (mut lengths, mut left) = (Vec::new(), total);
    while left > 0 {
        let length = (lengths.len() * 7919 % 30_000).min(left);
        lengths.push(length);
        left -= length;
    }
    lengths
}

#[tokio::test]
async fn transfers_may_be_in_many_ranges_of_memory() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    let size = 9 << 20;
    for (seed, protocol) in (0..).zip(ALL) {
        let mut connection = node.connect(protocol).await;
        let bytes = content(size, seed);
        let (mut ranges, mut rest) = (Vec::new(), &bytes[..]);
        for length in lengths(size) {
            let (range, following) = rest.split_at(length);
            ranges.push(range);
            rest = following;
        }
        assert!(ranges.len() > 512, "{}", ranges.len());
        connection.write_ranges(BASE, &ranges).await.unwrap();
        // From another position on, so that the ranges differ from those that were written.
        let (from, mut read, mut observed) = (12_345, vec![0; size - 12_345], Vec::new());
        let (mut into, mut rest) = (Vec::new(), &mut read[..]);
        for length in lengths(size - from) {
            let (range, following) = rest.split_at_mut(length);
            into.push(range);
            rest = following;
        }
        let observer = |bytes: &[u8]| observed.extend_from_slice(bytes);
        connection.read_ranges(BASE + from as u64, &mut into, observer).await.unwrap();
        assert!(read == bytes[from..] && observed == read, "{protocol:?}");
    }
    let counts = node.server.counts().snapshot();
    assert_eq!((counts.reads, counts.writes), (3, 3), "one transfer each");
    assert_eq!((counts.failed, counts.rejected, counts.damaged), (0, 0, 0));
}

#[tokio::test]
async fn ranges_outside_the_memory_are_rejected() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    let mut neighbour = node.connect(TransferProtocol::V2).await;
    for protocol in [TransferProtocol::V2, TransferProtocol::Checked] {
        for (start, size) in
            [(BASE - 1, 4), (BASE + SIZE as u64 - 3, 4), (BASE + SIZE as u64, 4 << 20), (0, 1)]
        {
            let mut connection = node.connect(protocol).await;
            let error = connection.read(start, &mut vec![0; size]).await.unwrap_err();
            assert!(matches!(error, TransferError::Rejected { .. }), "{error}");
            let mut connection = node.connect(protocol).await;
            let error = connection.write(start, &vec![0; size]).await.unwrap_err();
            assert!(
                matches!(error, TransferError::Rejected { start: rejected, .. } if rejected == start),
                "{error}"
            );
        }
    }
    let mut connection = node.connect(TransferProtocol::V1).await;
    let error = connection.read(0, &mut [0]).await.unwrap_err();
    assert!(matches!(error, TransferError::Broken { .. }), "{error}");
    // The rejection is counted when the connection ends.
    node::wait_until(|| node.server.counts().snapshot().rejected == 17).await;
    neighbour.write(BASE, b"well").await.unwrap();
}

#[tokio::test]
async fn corrupt_memory_fails_the_checksum() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    let mut connection = node.connect(TransferProtocol::Checked).await;
    let bytes = content(100_000, 1);
    connection.write(BASE, &bytes).await.unwrap();
    node.memory.damage(70_000);
    let error = connection.read(BASE, &mut vec![0; 100_000]).await.unwrap_err();
    assert!(matches!(error, TransferError::Checksum { start: BASE, size: 100_000, .. }), "{error}");
    // The connection stays usable, and other ranges are intact.
    let mut half = vec![0; 50_000];
    connection.read(BASE, &mut half).await.unwrap();
    assert_eq!(half, bytes[..50_000]);
}

#[tokio::test]
async fn a_drain_waits_for_transfers_in_progress_only() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    let mut idle = node.connect(TransferProtocol::V2).await;
    idle.write(BASE, b"before").await.unwrap();
    let mut busy = node.raw(TransferProtocol::V2, true, BASE, 10).await;
    busy.send(b"01234").await;
    node.memory.wait_transfer_started().await;
    let draining = node.server.drain(LIMIT);
    let end = async {
        // The idle connection has ended, the busy one has not.
        node::wait_until(|| idle.is_stale()).await;
        busy.send(b"56789").await;
        assert_eq!(busy.status().await, Some(0));
    };
    let (closed, ()) = tokio::join!(draining, end);
    assert_eq!(closed, 0);
    assert_eq!(node.server.open(), 0);
    assert!(idle.write(BASE, b"after").await.is_err());
    assert!(node.dial(TransferProtocol::V2).await.is_err(), "the listener is closed");
}

#[tokio::test]
async fn a_drain_closes_stalled_connections_at_its_limit() {
    let node = TestTransferNode::start(TransferServerOptions::default()).await;
    let mut busy = node.raw(TransferProtocol::V2, true, BASE, 10).await;
    busy.send(b"01234").await;
    node.memory.wait_transfer_started().await;
    assert_eq!(node.server.drain(Duration::from_millis(1)).await, 1);
    assert_eq!(busy.status().await, None);
}
