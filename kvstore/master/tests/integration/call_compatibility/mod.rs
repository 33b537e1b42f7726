//! Makes the same calls to Mooncake's master and to this one.

mod codes;
mod disks;

use bytes::BytesMut;
use mooncake_wire::Dialect;
use mooncake_wire::rpc::RpcMethod;
use moongate_store_testkit::mooncake::{NEWEST, RealMaster};
use moongate_store_testkit::test_master::{TestRpcConnection, minimal_request, start_master};
use tokio::io::AsyncWriteExt as _;

/// Replies of Mooncake's master that differ here on purpose.
const EXPECTED_DIFFERENCES: &[&str] = &[
    // This master registers a client with its mount, so the client need not mount again.
    "ClientStatus(2)",
    // A client cannot unmount the segments of another one.
    "UnmountSegment: ok",
];

/// The sequence puts an object that no segment can hold. Mooncake's master then evicts the next object that it can, at
/// a time that its eviction thread chooses.
const WITHOUT_EVICTION: &[&str] = &["--eviction_ratio=0"];

/// Replies to the minimal request of every method.
async fn minimal_replies(address: &str) -> Vec<(RpcMethod, u8, Vec<u8>)> {
    let mut connection = TestRpcConnection::connect(address).await;
    let mut replies = Vec::new();
    for method in RpcMethod::ALL {
        let request: BytesMut = minimal_request(*method, Dialect::NEWEST);
        connection.stream.write_all(&request).await.unwrap();
        let (header, body) = connection.response().await.unwrap();
        replies.push((*method, header.error, strip_debug_type(&body)));
    }
    replies
}

/// The reply without the type string that debug builds of Mooncake add.
fn strip_debug_type(body: &[u8]) -> Vec<u8> {
    let mut plain = body.to_vec();
    if let [head @ .., meta] = &mut plain[..5]
        && head[0] & 1 == 1
        && *meta & 4 != 0
    {
        *meta &= !4;
        let has_size = *meta & 0b11 != 0;
        let start = if has_size { 7 } else { 5 };
        let end = start + plain[start..].iter().position(|byte| *byte == 0).unwrap();
        plain.drain(start..=end);
        if has_size {
            let size = u16::try_from(plain.len()).unwrap();
            plain[5..start].copy_from_slice(&size.to_le_bytes());
        }
        if plain[4] == 0 {
            plain.remove(4);
            plain[0] &= !1;
        }
    }
    plain
}

#[tokio::test]
async fn minimal_requests_get_the_same_replies() {
    let real = RealMaster::start(NEWEST).await;
    let master = start_master();
    let expected = minimal_replies(&real.rpc).await;
    let actual = minimal_replies(&master.rpc.address().to_string()).await;
    let differences: Vec<_> = expected
        .iter()
        .zip(&actual)
        .filter(|(expected, actual)| expected != actual)
        .map(|(expected, actual)| format!("{expected:?} {:?}", actual.2))
        .collect();
    assert!(differences.is_empty(), "Mooncake's and Moongate's:\n{}", differences.join("\n"));
}

#[tokio::test]
async fn a_sequence_of_calls_gets_the_same_codes() {
    let real = RealMaster::start_with(NEWEST, WITHOUT_EVICTION).await;
    let master = start_master();
    let expected = codes::transcript(&real.rpc).await;
    let actual = codes::transcript(&master.rpc.address().to_string()).await;
    assert_eq!(expected.len(), actual.len());
    let differences = expected.iter().zip(&actual).filter(|(expected, actual)| expected != actual);
    let is_expected =
        |expected: &str| EXPECTED_DIFFERENCES.iter().any(|difference| expected.contains(difference));
    let differences = differences.filter(|(expected, _)| !is_expected(expected));
    let differences: Vec<_> =
        differences.map(|(expected, actual)| format!("{expected}   {actual}")).collect();
    assert!(differences.is_empty(), "Mooncake's and Moongate's:\n{}", differences.join("\n"));
}
