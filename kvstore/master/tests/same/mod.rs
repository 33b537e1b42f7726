//! The same calls to Mooncake's master and to this one.

mod codes;
mod disks;

use bytes::BytesMut;
use mooncake_wire::Dialect;
use mooncake_wire::rpc::RpcMethod;
use tokio::io::AsyncWriteExt as _;

use crate::caller::{self, TestRpcConnection, start_master};
use crate::world::{NEWEST, RealMaster};

/// Calls that end otherwise here, by what Mooncake's master answers.
const EXPECTED_DIFFERENCES: &[&str] = &[
    // A node that has mounted is known: it need not do it again.
    "ClientStatus(2)",
    // Nobody takes another's memory away.
    "UnmountSegment: ok",
];

/// What a master answers to the simplest form of every request.
async fn minimal_replies(address: &str) -> Vec<(RpcMethod, u8, Vec<u8>)> {
    let mut connection = TestRpcConnection::connect(address).await;
    let mut answers = Vec::new();
    for method in RpcMethod::ALL {
        let request: BytesMut = caller::minimal_request(*method, Dialect::NEWEST);
        connection.stream.write_all(&request).await.unwrap();
        let (header, body) = connection.response().await.unwrap();
        answers.push((*method, header.error, strip_debug_type(&body)));
    }
    answers
}

/// The reply's value: builds of Mooncake for debugging send its type along.
fn strip_debug_type(body: &[u8]) -> Vec<u8> {
    let mut plain = body.to_vec();
    if let [head @ .., meta] = &mut plain[..5]
        && head[0] & 1 == 1
        && *meta & 4 != 0
    {
        *meta &= !4;
        let end = 5 + plain[5..].iter().position(|byte| *byte == 0).unwrap();
        plain.drain(5..=end);
        if plain[4] == 0 {
            plain.remove(4);
            plain[0] &= !1;
        }
    }
    plain
}

#[tokio::test]
async fn simple_calls_are_answered_alike() {
    let real = RealMaster::start(NEWEST).await;
    let ours = start_master();
    let expected = minimal_replies(&real.rpc).await;
    let found = minimal_replies(&ours.rpc.address().to_string()).await;
    let differ: Vec<_> = expected
        .iter()
        .zip(&found)
        .filter(|(expected, found)| expected != found)
        .map(|(expected, found)| format!("{expected:?} {:?}", found.2))
        .collect();
    assert!(differ.is_empty(), "Mooncake's and ours:\n{}", differ.join("\n"));
}

#[tokio::test]
async fn a_history_of_calls_ends_alike() {
    let real = RealMaster::start(NEWEST).await;
    let ours = start_master();
    let expected = codes::transcript(&real.rpc).await;
    let found = codes::transcript(&ours.rpc.address().to_string()).await;
    assert_eq!(expected.len(), found.len());
    let differ = expected.iter().zip(&found).filter(|(expected, found)| expected != found);
    let is_known = |expected: &str| EXPECTED_DIFFERENCES.iter().any(|known| expected.contains(known));
    let differ = differ.filter(|(expected, _)| !is_known(expected));
    let differ: Vec<_> = differ.map(|(expected, found)| format!("{expected}   {found}")).collect();
    assert!(differ.is_empty(), "Mooncake's and ours:\n{}", differ.join("\n"));
}
