//! A node that answers handshakes, and a client that connects, over a device of this machine. `tests/rdma/run` has a
//! virtual machine with one.
#![cfg(feature = "verbs")]
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::sync::Arc;
use std::time::Duration;

use moongate_memory::{MappedRegion, PageMode};
use moongate_rdma::{RdmaAcceptor, RdmaConnection, RdmaFabric, RdmaStaging, RegisteredMemory, STAGING_CHUNK};
use moongate_runtime::Supervisor;
use moongate_transfer::handshake::{self, HandshakeHandler, HandshakeKind, HandshakeLimits};
use moongate_transfer::{AllowedPeers, SegmentBuffer, SegmentDescriptor, TransferError, TransferLimits};
use tokio::net::TcpListener;

const SIZE: u64 = 32 << 20;

struct TestRdmaHandler(RdmaAcceptor);

impl HandshakeHandler for TestRdmaHandler {
    fn respond(&self, _: HandshakeKind, question: &[u8]) -> Vec<u8> {
        self.0.respond(question)
    }
}

/// A node as its peers see it, and its memory.
struct TestRdmaNode {
    supervisor: Supervisor,
    fabric: Arc<RdmaFabric>,
    staging: Arc<RdmaStaging>,
    node: Arc<TestRdmaHandler>,
    region: Arc<MappedRegion>,
    _lent: RegisteredMemory,
    address: String,
    descriptor: SegmentDescriptor,
}

impl TestRdmaNode {
    async fn new() -> Self {
        let supervisor = Supervisor::new();
        let fabric = Arc::new(RdmaFabric::open(&[]).unwrap());
        let region = Arc::new(MappedRegion::anonymous(SIZE, PageMode::Normal).unwrap());
        let lent = fabric.register(&region).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let node = Arc::new(TestRdmaHandler(RdmaAcceptor::new(Arc::clone(&fabric), address.clone())));
        let answers: Arc<dyn HandshakeHandler> = Arc::<TestRdmaHandler>::clone(&node);
        let limits = HandshakeLimits::default();
        handshake::listen(
            listener,
            answers,
            AllowedPeers::all(),
            None,
            limits,
            supervisor.token(),
            &supervisor,
        );
        let mut buffer = SegmentBuffer { addr: region.base(), length: SIZE, ..SegmentBuffer::default() };
        lent.describe(&mut buffer);
        let mut descriptor = SegmentDescriptor {
            name: address.clone(),
            buffers: vec![buffer],
            ..SegmentDescriptor::default()
        };
        fabric.describe(&mut descriptor);
        let staging = Arc::new(RdmaStaging::new(&fabric, 4).unwrap());
        Self { supervisor, fabric, staging, node, region, _lent: lent, address, descriptor }
    }

    async fn connect(&self, descriptor: &SegmentDescriptor) -> Result<RdmaConnection, TransferError> {
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
    let world = TestRdmaNode::new().await;
    assert_eq!(world.descriptor.protocol, "rdma");
    let connection = world.connect(&world.descriptor).await.unwrap();
    for (offset, len) in [(0, 1), (17, 70_000), (5, STAGING_CHUNK as usize * 5 + 3)] {
        let bytes: Vec<u8> = (0..len).map(|at| (at % 239) as u8).collect();
        connection.write(world.region.base() + offset, &bytes).await.unwrap();
        let mut there = vec![0; len];
        world.region.read_at(offset, &mut there).unwrap();
        assert!(there == bytes, "{len} bytes written");
        there.fill(0);
        connection.read(world.region.base() + offset, &mut there).await.unwrap();
        assert!(there == bytes, "{len} bytes read");
    }
    // Another client's connection is another link.
    let _other = world.connect(&world.descriptor).await.unwrap();
    assert_eq!(world.node.0.links(), 2);
    world.supervisor.shutdown(Duration::from_secs(30)).await.unwrap();
}

#[tokio::test]
#[ignore = "needs an RDMA device"]
async fn wrong_ranges_keys_and_devices_are_refused() {
    let world = TestRdmaNode::new().await;
    let connection = world.connect(&world.descriptor).await.unwrap();
    for start in [0, world.region.base() + SIZE, world.region.base() - 1, u64::MAX] {
        let refused = connection.write(start, b"moon").await;
        assert!(matches!(refused, Err(TransferError::Rejected { .. })), "{refused:?}");
    }
    connection.write(world.region.base(), b"moon").await.unwrap();

    let mut wrong = world.descriptor.clone();
    wrong.buffers[0].rkey[0] ^= 0x00ff_ff00;
    let connection = world.connect(&wrong).await.unwrap();
    let failed = connection.write(world.region.base(), b"moon").await;
    assert!(matches!(failed, Err(TransferError::Broken { .. })), "{failed:?}");
    assert!(connection.write(world.region.base(), b"moon").await.is_err(), "it is of no use any more");

    let mut wrong = world.descriptor.clone();
    wrong.devices[0].name = "none".to_owned();
    let refused = world.connect(&wrong).await.unwrap_err().to_string();
    assert!(refused.contains("this node has no device none"), "{refused}");
    let nowhere = SegmentDescriptor { devices: Vec::new(), ..world.descriptor.clone() };
    assert!(matches!(world.connect(&nowhere).await, Err(TransferError::Connect { .. })));

    let again = world.connect(&world.descriptor).await.unwrap();
    again.write(world.region.base(), b"moon").await.unwrap();
}
