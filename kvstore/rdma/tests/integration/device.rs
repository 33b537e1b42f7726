//! Transfers with the device's queue pairs.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use moongate_memory::{MappedRegion, PageMode};
use moongate_rdma::connection::{HandshakeMessage, RemoteQueuePairs};
use moongate_rdma::device::{self, RdmaDevice};
use moongate_rdma::{
    LocalMemory, Nic, RdmaLink, RdmaLinkError, RdmaOperation, RegisteredRegion, RemoteMemory,
};

const LIMIT: Duration = Duration::from_secs(60);
const SIZE: u64 = 48 << 20;

fn first_device() -> RdmaDevice {
    let found = device::devices(Path::new(device::SYSFS)).unwrap();
    found.into_iter().find_map(|(_, device)| device.ok()).unwrap()
}

fn packets(device: &RdmaDevice) -> u64 {
    let counter =
        format!("/sys/class/infiniband/{}/ports/{}/hw_counters/sent_pkts", device.name, device.port);
    fs::read_to_string(counter).unwrap().trim().parse().unwrap()
}

fn remote(link: &RdmaLink, nic: &Nic) -> RemoteQueuePairs {
    let message = HandshakeMessage {
        local_lid: nic.device().lid,
        local_gid: nic.device().gid.gid.to_string(),
        qp_num: link.numbers(),
        ..HandshakeMessage::default()
    };
    HandshakeMessage::read(&message.write()).unwrap().remote(None).unwrap()
}

/// Two ends on the same device, each with its own memory.
struct LoopbackNics {
    nics: [Arc<Nic>; 2],
    memory: [Arc<RegisteredRegion>; 2],
}

impl LoopbackNics {
    fn new() -> Self {
        let nics = [(), ()].map(|()| Nic::open(first_device()).unwrap());
        let memory = [0, 1].map(|end: usize| {
            nics[end].register(Arc::new(MappedRegion::anonymous(SIZE, PageMode::Normal).unwrap())).unwrap()
        });
        Self { nics, memory }
    }

    fn links(&self) -> [RdmaLink; 2] {
        let links =
            [0, 1].map(|end: usize| RdmaLink::new(&self.nics[end], format!("end {}", 1 - end)).unwrap());
        for end in [0, 1] {
            links[end].connect(&remote(&links[1 - end], &self.nics[1 - end])).unwrap();
        }
        links
    }

    fn target(&self, offset: u64) -> RemoteMemory {
        RemoteMemory { address: self.memory[1].region().base() + offset, key: self.memory[1].remote_key() }
    }

    fn local(&self, len: u64) -> LocalMemory<'_> {
        LocalMemory { memory: &self.memory[0], offset: 0, len }
    }
}

fn pattern(len: u64) -> Vec<u8> {
    (0..len).map(|index| (index % 251) as u8 ^ (index >> 16) as u8).collect()
}

#[tokio::test]
#[ignore = "needs an RDMA device"]
async fn bytes_written_to_a_peer_are_read_back() {
    let ends = LoopbackNics::new();
    let [link, _other] = ends.links();
    let before = packets(ends.nics[0].device());
    // The largest transfer has more slices than may be in flight.
    for len in [1, 65_535, 65_537, 40 << 20] {
        let bytes = pattern(len);
        ends.memory[0].region().write_at(0, &bytes).unwrap();
        link.transfer(RdmaOperation::Write, ends.local(len), ends.target(3), Arc::new(()), LIMIT)
            .await
            .unwrap();
        let mut received = vec![0; bytes.len()];
        ends.memory[1].region().read_at(3, &mut received).unwrap();
        assert!(received == bytes, "{len} bytes written");
        ends.memory[0].region().write_at(0, &vec![0; bytes.len()]).unwrap();
        link.transfer(RdmaOperation::Read, ends.local(len), ends.target(3), Arc::new(()), LIMIT)
            .await
            .unwrap();
        ends.memory[0].region().read_at(0, &mut received).unwrap();
        assert!(received == bytes, "{len} bytes read");
    }
    assert!(
        packets(ends.nics[0].device()) - before > (40 << 20) / 4096,
        "at least the packets of the largest transfer"
    );
}

#[tokio::test]
#[ignore = "needs an RDMA device"]
async fn unregistered_memory_is_rejected_and_a_new_link_works() {
    let ends = LoopbackNics::new();
    for wrong in [
        RemoteMemory { key: ends.target(0).key ^ 0x00ff_ff00, ..ends.target(0) },
        ends.target(SIZE),
        RemoteMemory { address: 0, ..ends.target(0) },
    ] {
        let [link, _other] = ends.links();
        let result =
            link.transfer(RdmaOperation::Write, ends.local(100_000), wrong, Arc::new(()), LIMIT).await;
        assert!(matches!(result, Err(RdmaLinkError::Failed { .. })), "{result:?}");
        assert!(link.is_broken());
        let retried =
            link.transfer(RdmaOperation::Read, ends.local(1), ends.target(0), Arc::new(()), LIMIT).await;
        assert!(retried.is_err());
    }
    let [link, _other] = ends.links();
    link.transfer(RdmaOperation::Write, ends.local(100_000), ends.target(0), Arc::new(()), LIMIT)
        .await
        .unwrap();
}

#[tokio::test]
#[ignore = "needs an RDMA device"]
async fn a_vanished_peer_is_detected_and_the_memory_released() {
    let ends = LoopbackNics::new();
    let [link, other] = ends.links();
    drop(other);
    let guard = Arc::new(());
    let limit = Duration::from_millis(50);
    let result =
        link.transfer(RdmaOperation::Write, ends.local(1 << 20), ends.target(0), guard.clone(), limit).await;
    assert!(
        matches!(result, Err(RdmaLinkError::TimedOut { .. } | RdmaLinkError::Failed { .. })),
        "{result:?}"
    );
    drop(link);
    assert_eq!(Arc::strong_count(&guard), 1, "a dropped link has no requests in flight");
}
