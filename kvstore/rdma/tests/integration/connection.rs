//! A node that accepts RDMA connections and a client that connects.

use std::sync::Arc;
use std::time::Duration;

use moongate_memory::{MappedRegion, PageMode};
use moongate_rdma::{
    RdmaAcceptor, RdmaConnectError, RdmaConnection, RdmaFabric, RdmaLinkSetupError, RdmaStaging,
    RegisteredMemory, STAGING_CHUNK,
};
use moongate_runtime::Supervisor;
use moongate_transfer::handshake::{
    self, HandshakeHandler, HandshakeKind, HandshakeLimits, HandshakeOptions,
};
use moongate_transfer::{AllowedPeers, SegmentBuffer, SegmentDescriptor, TransferError, TransferLimits};
use tokio::net::TcpListener;

const SIZE: u64 = 32 << 20;

struct TestRdmaHandler(RdmaAcceptor);

impl HandshakeHandler for TestRdmaHandler {
    fn respond(&self, _: HandshakeKind, request: &[u8]) -> Vec<u8> {
        self.0.respond(request)
    }
}

/// A node with its memory, as peers see it.
struct TestRdmaNode {
    supervisor: Supervisor,
    fabric: Arc<RdmaFabric>,
    staging: Arc<RdmaStaging>,
    node: Arc<TestRdmaHandler>,
    region: Arc<MappedRegion>,
    _registration: RegisteredMemory,
    address: String,
    descriptor: SegmentDescriptor,
}

impl TestRdmaNode {
    async fn new() -> Self {
        let supervisor = Supervisor::new();
        let fabric = Arc::new(RdmaFabric::open(&[]).unwrap());
        let region = Arc::new(MappedRegion::anonymous(SIZE, PageMode::Normal).unwrap());
        let registration = fabric.register(&region).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let node = Arc::new(TestRdmaHandler(RdmaAcceptor::new(Arc::clone(&fabric), address.clone())));
        let handler: Arc<dyn HandshakeHandler> = Arc::<TestRdmaHandler>::clone(&node);
        let options =
            HandshakeOptions { peers: AllowedPeers::all(), tls: None, limits: HandshakeLimits::default() };
        handshake::listen(listener, handler, options, &supervisor);
        let mut buffer = SegmentBuffer { addr: region.base(), length: SIZE, ..SegmentBuffer::default() };
        registration.describe(&mut buffer);
        let mut descriptor = SegmentDescriptor {
            name: address.clone(),
            buffers: vec![buffer],
            ..SegmentDescriptor::default()
        };
        fabric.describe(&mut descriptor);
        let staging = Arc::new(RdmaStaging::new(&fabric, 4).unwrap());
        Self { supervisor, fabric, staging, node, region, _registration: registration, address, descriptor }
    }

    async fn connect(&self, descriptor: &SegmentDescriptor) -> Result<RdmaConnection, RdmaConnectError> {
        let descriptor = Arc::new(descriptor.clone());
        let limits = TransferLimits { stall: Duration::from_secs(60), ..TransferLimits::default() };
        RdmaConnection::open(
            &self.fabric,
            Arc::clone(&self.staging),
            "client",
            &self.address,
            descriptor,
            limits,
        )
        .await
    }
}

#[tokio::test]
#[ignore = "needs an RDMA device"]
async fn a_client_reads_what_it_wrote_into_a_nodes_memory() {
    let test_node = TestRdmaNode::new().await;
    assert_eq!(test_node.descriptor.protocol, "rdma");
    let connection = test_node.connect(&test_node.descriptor).await.unwrap();
    for (offset, len) in [(0, 1), (17, 70_000), (5, STAGING_CHUNK as usize * 5 + 3)] {
        let bytes: Vec<u8> = (0..len).map(|index| (index % 239) as u8).collect();
        connection.write(test_node.region.base() + offset, &bytes).await.unwrap();
        let mut received = vec![0; len];
        test_node.region.read_at(offset, &mut received).unwrap();
        assert!(received == bytes, "{len} bytes written");
        received.fill(0);
        connection.read(test_node.region.base() + offset, &mut received).await.unwrap();
        assert!(received == bytes, "{len} bytes read");
    }
    // Each connection of a client is a separate link.
    let _other = test_node.connect(&test_node.descriptor).await.unwrap();
    assert_eq!(test_node.node.0.links(), 2);
    test_node.supervisor.shutdown(Duration::from_secs(30)).await.unwrap();
}

#[tokio::test]
#[ignore = "needs an RDMA device"]
async fn wrong_ranges_keys_and_devices_are_rejected() {
    let test_node = TestRdmaNode::new().await;
    let connection = test_node.connect(&test_node.descriptor).await.unwrap();
    for start in [0, test_node.region.base() + SIZE, test_node.region.base() - 1, u64::MAX] {
        let refused = connection.write(start, b"moon").await;
        assert!(matches!(refused, Err(TransferError::Rejected { .. })), "{refused:?}");
    }
    connection.write(test_node.region.base(), b"moon").await.unwrap();

    let mut wrong = test_node.descriptor.clone();
    wrong.buffers[0].rkey[0] ^= 0x00ff_ff00;
    let connection = test_node.connect(&wrong).await.unwrap();
    let failed = connection.write(test_node.region.base(), b"moon").await;
    assert!(matches!(failed, Err(TransferError::Broken { .. })), "{failed:?}");
    assert!(connection.write(test_node.region.base(), b"moon").await.is_err(), "the link is broken");

    let mut wrong = test_node.descriptor.clone();
    wrong.devices[0].name = "none".to_owned();
    let refused = test_node.connect(&wrong).await.unwrap_err().to_string();
    assert!(refused.contains("this node has no device none"), "{refused}");
    let no_devices = SegmentDescriptor { devices: Vec::new(), ..test_node.descriptor.clone() };
    let refused = test_node.connect(&no_devices).await.unwrap_err().source;
    assert!(matches!(refused, RdmaLinkSetupError::NoDevice), "{refused}");

    let reconnected = test_node.connect(&test_node.descriptor).await.unwrap();
    reconnected.write(test_node.region.base(), b"moon").await.unwrap();
}
