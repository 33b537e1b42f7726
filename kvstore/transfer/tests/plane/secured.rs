//! Over TLS: authentication, and what a capability allows.

use std::sync::Arc;

use mooncake_wire::capability::{
    AccessGrant, AccessRights, Capability, CapabilityError, CertificateFingerprint, RequestedAccess,
    SegmentKey,
};
use mooncake_wire::types::Uuid;
use moongate_runtime::{PeerTls, PeerTlsFiles};
use moongate_testkit::TestAuthority;
use moongate_transfer::plane::TransferOperation;
use moongate_transfer::serve::{
    AddressRange, TransferAuthentication, TransferAuthorizer, TransferServerOptions,
};
use moongate_transfer::{TransferConnection, TransferError, TransferLimits, TransferProtocol};

use crate::node::{BASE, LIMIT, SIZE, TestTransferNode};

const SEGMENT: Uuid = Uuid { first: 1, second: 2 };
const NOW_MS: u64 = 1000;

fn key() -> SegmentKey {
    SegmentKey::new([7; 32])
}

/// Authorises one segment, with a fixed clock.
struct OneSegmentAuthorizer;

impl TransferAuthorizer for OneSegmentAuthorizer {
    fn check(
        &self,
        operation: TransferOperation,
        range: AddressRange,
        capability: &Capability,
        peer: &CertificateFingerprint,
    ) -> Result<(), CapabilityError> {
        let rights = match operation {
            TransferOperation::Read => AccessRights::Read,
            TransferOperation::Write => AccessRights::Write,
        };
        let transfer = RequestedAccess { rights, start: range.start, size: range.size, now_ms: NOW_MS };
        key().check(SEGMENT, capability, peer, transfer)
    }
}

fn program(authority: &TestAuthority, name: &str) -> PeerTls {
    let files = authority.issue_files(name, &["127.0.0.1"]).unwrap();
    PeerTls::load(PeerTlsFiles { certificate: files.certificate, key: files.key, ca: files.ca, name: None })
        .unwrap()
}

async fn start_node(authority: &TestAuthority) -> TestTransferNode {
    let tls = program(authority, "node");
    let authentication = TransferAuthentication { tls, authorizer: Arc::new(OneSegmentAuthorizer) };
    TestTransferNode::start(TransferServerOptions {
        authentication: Some(authentication),
        ..TransferServerOptions::default()
    })
    .await
}

async fn dial(node: &TestTransferNode, tls: &PeerTls) -> Result<TransferConnection, TransferError> {
    let limits = TransferLimits { stall: LIMIT, ..TransferLimits::default() };
    TransferConnection::open_secured("127.0.0.1", node.port, limits, tls).await
}

fn signed(tls: &PeerTls, rights: AccessRights, start: u64, size: u64) -> Capability {
    let grant = AccessGrant { rights, start, size, expires_ms: NOW_MS + 1 };
    key().sign(SEGMENT, grant, &tls.own_fingerprint().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_granted_range_is_written_and_read() {
    let store = TestAuthority::new().unwrap();
    let (node, client) = (start_node(&store).await, program(&store, "client"));
    let mut connection = dial(&node, &client).await.unwrap();
    let bytes: Vec<u8> = (0..300_000_u32).map(|index| index as u8).collect();
    connection.set_capability(Some(signed(&client, AccessRights::Write, BASE, bytes.len() as u64)));
    connection.write(BASE, &bytes).await.unwrap();
    connection.set_capability(Some(signed(&client, AccessRights::Read, BASE, bytes.len() as u64)));
    let mut read = vec![0; bytes.len() - 5];
    connection.read(BASE + 5, &mut read).await.unwrap();
    assert_eq!(read, bytes[5..]);
    // A read is counted after its last byte is handed to the kernel, when the reader may already have it.
    crate::node::wait_until(|| node.server.counts().snapshot().reads == 1).await;
    let counts = node.server.counts().snapshot();
    assert_eq!((counts.reads, counts.writes, counts.checked), (1, 1, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_else_is_rejected_before_any_transfer() {
    let store = TestAuthority::new().unwrap();
    let (client, other) = (program(&store, "client"), program(&store, "other"));
    let node = start_node(&store).await;
    let write = |size| signed(&client, AccessRights::Write, BASE, size);
    let expired = AccessGrant { expires_ms: NOW_MS, ..write(8).grant };
    let expired = key().sign(SEGMENT, expired, &client.own_fingerprint().unwrap());
    let cases = [
        (signed(&other, AccessRights::Write, BASE, 8), CapabilityError::InvalidSignature),
        (
            SegmentKey::new([8; 32]).sign(SEGMENT, write(8).grant, &client.own_fingerprint().unwrap()),
            CapabilityError::InvalidSignature,
        ),
        (expired, CapabilityError::Expired),
        (write(7), CapabilityError::OutOfRange),
        (signed(&client, AccessRights::Read, BASE, 8), CapabilityError::WrongOperation),
    ];
    for (capability, expected) in cases {
        let mut connection = dial(&node, &client).await.unwrap();
        connection.set_capability(Some(capability));
        let error = connection.write(BASE, &[1; 8]).await.unwrap_err();
        assert!(matches!(error, TransferError::Refused { refusal, .. } if refusal == expected), "{error}");
    }
    let mut connection = dial(&node, &client).await.unwrap();
    connection.set_capability(Some(write(8)));
    let error = connection.read(BASE, &mut [0; 8]).await.unwrap_err();
    assert!(
        matches!(error, TransferError::Refused { refusal: CapabilityError::WrongOperation, .. }),
        "{error}"
    );
    let mut connection = dial(&node, &client).await.unwrap();
    let error = connection.write(BASE, &[1; 8]).await.unwrap_err();
    assert!(matches!(error, TransferError::NotGranted { .. }), "{error}");
    let mut connection = dial(&node, &client).await.unwrap();
    let end = BASE + SIZE as u64;
    connection.set_capability(Some(signed(&client, AccessRights::Write, end, 8)));
    let error = connection.write(end, &[1; 8]).await.unwrap_err();
    assert!(matches!(error, TransferError::Rejected { .. }), "{error}");

    assert_eq!(node.memory.bytes_at(0, 8), [0; 8]);
    crate::node::wait_until(|| node.server.counts().snapshot().rejected == 1).await;
    let refused = || {
        let counts = node.server.counts().snapshot();
        [counts.refused_forged, counts.refused_expired, counts.refused_range, counts.refused_rights]
    };
    crate::node::wait_until(|| refused() == [2, 1, 1, 2]).await;
    let counts = node.server.counts().snapshot();
    assert_eq!((counts.reads, counts.writes), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_without_a_certificate_of_the_authority_are_refused() {
    let (store, foreign) = (TestAuthority::new().unwrap(), TestAuthority::new().unwrap());
    let node = start_node(&store).await;
    let foreign_client = program(&foreign, "client");
    assert!(dial(&node, &foreign_client).await.is_err(), "the node's certificate is from another CA");
    let mut plain = node.connect(TransferProtocol::V2).await;
    let error = plain.read(BASE, &mut [0; 8]).await.unwrap_err().to_string();
    assert!(error.contains("set --store-tls-cert"), "{error}");
    crate::node::wait_until(|| node.server.counts().snapshot().unauthenticated == 2).await;

    let open = TestTransferNode::start(TransferServerOptions::default()).await;
    let error = dial(&open, &program(&store, "client")).await.unwrap_err().to_string();
    assert!(error.contains("if it does not use TLS"), "{error}");
}
