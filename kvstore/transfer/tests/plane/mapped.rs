//! Transfers through memory that client and node both map.

use std::io::{self, Read, Write};
use std::net::TcpStream as Socket;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moongate_memory::packet_socket::PacketSocket;
use moongate_memory::{MappedRegion, PageMode};
use moongate_runtime::Supervisor;
use moongate_transfer::plane::{MappingId, STATUS, TransferHeader, TransferOperation, TransferStatus};
use moongate_transfer::serve::{self, AddressRange, TransferServer, TransferServerOptions, TransferTarget};
use moongate_transfer::shared::{
    SharedMapping, SharedMappings, SharedMemory, SharedMemoryServer, SharedMemoryUsers, SharedSegment,
};
use moongate_transfer::{
    SharedMemoryAddress, TransferConnection, TransferError, TransferLimits, TransferProtocol,
};
use parking_lot::Mutex;
use rustix::net::SocketAddrUnix;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::node::{BASE, SIZE, content, wait_until};

/// A segment in a memory file, that keeps the last recorded checksum.
struct SharedTestMemory {
    region: MappedRegion,
    fd: Arc<OwnedFd>,
    id: MappingId,
    /// Whether writes need their checksum.
    is_recorded: bool,
    recorded: Mutex<Option<(AddressRange, u32)>>,
    /// Whether writes are found to overlap others.
    overlaps: AtomicBool,
}

impl SharedTestMemory {
    fn offset(range: AddressRange) -> u64 {
        range.start - BASE
    }
}

impl SharedMemory for SharedTestMemory {
    fn shared_segment(&self, address: u64) -> Option<SharedSegment> {
        let is_inside = (BASE..BASE + SIZE as u64).contains(&address);
        let fd = Arc::clone(&self.fd);
        is_inside.then(|| SharedSegment { id: self.id, base: BASE, size: SIZE as u64, fd })
    }
}

impl TransferTarget for SharedTestMemory {
    fn contains(&self, range: AddressRange) -> bool {
        range.start >= BASE && range.start + range.size <= BASE + SIZE as u64
    }

    fn is_readable(&self, _: AddressRange) -> bool {
        true
    }

    fn receive(
        &self,
        mut socket: &Socket,
        range: AddressRange,
        _: bool,
        verify: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        *self.recorded.lock() = None;
        let mut bytes = vec![0; range.size as usize];
        socket.read_exact(&mut bytes)?;
        self.region.write_at(Self::offset(range), &bytes)?;
        verify(Some(crc_fast::crc32_iscsi(&bytes)))
    }

    fn send(&self, socket: &Socket, range: AddressRange) -> io::Result<()> {
        self.send_summed(socket, range).map(drop)
    }

    fn send_summed(&self, mut socket: &Socket, range: AddressRange) -> io::Result<u32> {
        let mut bytes = vec![0; range.size as usize];
        self.region.read_at(Self::offset(range), &mut bytes)?;
        socket.write_all(&bytes)?;
        Ok(crc_fast::crc32_iscsi(&bytes))
    }

    fn receive_from(
        &self,
        _: &mut dyn Read,
        _: AddressRange,
        _: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn send_to(&self, _: &mut dyn Write, _: AddressRange) -> io::Result<u32> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn admit_mapped(&self, _: AddressRange, mapping: MappingId) -> bool {
        mapping == self.id
    }

    fn needs_mapped_checksum(&self, _: AddressRange) -> bool {
        self.is_recorded
    }

    fn receive_mapped(
        &self,
        range: AddressRange,
        wait: &mut dyn FnMut() -> io::Result<Option<u32>>,
    ) -> io::Result<bool> {
        *self.recorded.lock() = None;
        *self.recorded.lock() = wait()?.map(|crc| (range, crc));
        Ok(!self.overlaps.load(Ordering::SeqCst))
    }

    fn checksum(&self, range: AddressRange) -> Option<u32> {
        self.recorded.lock().filter(|(recorded, _)| *recorded == range).map(|(_, crc)| crc)
    }
}

struct SharedTestNode {
    memory: Arc<SharedTestMemory>,
    server: TransferServer,
    sharing: SharedMemoryServer,
    mappings: SharedMappings,
    port: u16,
    _supervisor: Supervisor,
}

impl SharedTestNode {
    async fn start(is_recorded: bool) -> Self {
        let (region, fd) = MappedRegion::shared("moongate-test", SIZE as u64, PageMode::Normal).unwrap();
        let memory = Arc::new(SharedTestMemory {
            region,
            fd: Arc::new(fd),
            id: MappingId::new(fastrand::u64(..)),
            is_recorded,
            recorded: Mutex::default(),
            overlaps: AtomicBool::new(false),
        });
        let supervisor = Supervisor::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let target: Arc<dyn TransferTarget> = Arc::<SharedTestMemory>::clone(&memory);
        let server = serve::listen(listener, target, TransferServerOptions::default(), &supervisor).unwrap();
        let name = format!("@moongate-test-{:016x}", fastrand::u64(..));
        let shared: Arc<dyn SharedMemory> = Arc::<SharedTestMemory>::clone(&memory);
        let sharing = SharedMemoryServer::start(&name, SharedMemoryUsers::OwnAndRoot, shared).unwrap();
        Self { memory, server, sharing, mappings: SharedMappings::default(), port, _supervisor: supervisor }
    }

    async fn connect(&self) -> TransferConnection {
        let limits = TransferLimits::default();
        let opened =
            TransferConnection::open("127.0.0.1", self.port, TransferProtocol::Checked, limits).await;
        opened.unwrap()
    }

    fn map(&self) -> Arc<SharedMapping> {
        self.mappings.get(self.sharing.address(), BASE).unwrap().upgrade().unwrap()
    }
}

#[tokio::test]
async fn what_is_written_is_read_in_every_way() {
    for is_recorded in [false, true] {
        let node = SharedTestNode::start(is_recorded).await;
        let (mapping, mut connection) = (node.map(), node.connect().await);
        for size in [1, 4095, 65_537, (5 << 20) + 1] {
            let (bytes, start) = (content(size, size as u64), BASE + 17);
            let (one, two) = bytes.split_at(size / 3);
            connection.write_mapped(&mapping, start, &[one, &[], two]).await.unwrap();
            let (mut read, mut observed) = (vec![0; size], Vec::new());
            let (into, rest) = read.split_at_mut(size / 2);
            let observer = |bytes: &[u8]| observed.extend_from_slice(bytes);
            connection.read_mapped(&mapping, start, &mut [into, rest], observer).await.unwrap();
            assert!(read == bytes && observed == bytes, "{size} bytes");
            let has_record = node.memory.recorded.lock().is_some();
            assert_eq!(has_record, is_recorded, "{size} bytes");
            // Over the same connection through the socket, too.
            let mut read = vec![0; size];
            connection.read(start, &mut read).await.unwrap();
            assert!(read == bytes, "{size} bytes");
            connection.write(start, &content(size, 1)).await.unwrap();
            connection.read_mapped(&mapping, start, &mut [&mut read], |_| ()).await.unwrap();
            assert!(read == content(size, 1), "{size} bytes");
        }
        let counts = node.server.counts().snapshot();
        assert_eq!((counts.mapped, counts.checked), (12, 8));
        assert_eq!((counts.failed, counts.rejected, counts.damaged), (0, 0, 0));
    }
}

#[tokio::test]
async fn a_mapping_of_another_process_is_rejected() {
    let (old, node) = (SharedTestNode::start(false).await, SharedTestNode::start(false).await);
    let mapping = old.map();
    for is_write in [false, true] {
        let mut connection = node.connect().await;
        let moved = if is_write {
            connection.write_mapped(&mapping, BASE, &[b"other"]).await
        } else {
            connection.read_mapped(&mapping, BASE, &mut [&mut [0; 5]], |_| ()).await
        };
        assert!(matches!(moved, Err(TransferError::Rejected { size: 5, .. })), "{moved:?}");
    }
    let mut untouched = [1; 5];
    node.memory.region.read_at(0, &mut untouched).unwrap();
    assert_eq!(untouched, [0; 5]);
    // The rejection is counted when the connection ends.
    wait_until(|| node.server.counts().snapshot().rejected == 2).await;
}

#[tokio::test]
async fn a_recorded_checksum_reveals_damage() {
    let node = SharedTestNode::start(true).await;
    let (mapping, mut connection) = (node.map(), node.connect().await);
    let bytes = content(100_000, 3);
    connection.write_mapped(&mapping, BASE, &[&bytes]).await.unwrap();
    node.memory.region.write_at(70_000, b"?").unwrap();
    let mut read = vec![0; bytes.len()];
    let error = connection.read_mapped(&mapping, BASE, &mut [&mut read], |_| ()).await.unwrap_err();
    assert!(matches!(error, TransferError::Checksum { start: BASE, size: 100_000, .. }), "{error}");
    // The connection stays usable.
    connection.read_mapped(&mapping, BASE, &mut [&mut read[..50_000]], |_| ()).await.unwrap();
    node.memory.overlaps.store(true, Ordering::SeqCst);
    let error = connection.write_mapped(&mapping, BASE, &[&bytes]).await.unwrap_err();
    assert!(matches!(error, TransferError::Checksum { .. }), "{error}");
}

#[tokio::test]
async fn a_client_that_vanishes_leaves_no_record() {
    let node = SharedTestNode::start(true).await;
    let protocol = TransferProtocol::Mapped(node.memory.id);
    let header =
        TransferHeader { size: 10, address: BASE, operation: TransferOperation::Write, protocol }.encode();
    let mut socket = TcpStream::connect(("127.0.0.1", node.port)).await.unwrap();
    socket.write_all(&header).await.unwrap();
    let mut status = [0; STATUS];
    socket.read_exact(&mut status).await.unwrap();
    assert_eq!(TransferStatus::decode(status), Ok(TransferStatus::Ok));
    drop(socket);
    wait_until(|| node.server.counts().snapshot().failed == 1).await;
    assert!(node.memory.recorded.lock().is_none());
}

#[tokio::test]
async fn a_read_is_ordered_behind_unacknowledged_writes() {
    let node = SharedTestNode::start(false).await;
    let (mapping, mut reader) = (node.map(), node.connect().await);
    let size = 1 << 20;
    let mut writer = TcpStream::connect(("127.0.0.1", node.port)).await.unwrap();
    for round in 0..20 {
        let bytes = content(size, round);
        let (operation, protocol) = (TransferOperation::Write, TransferProtocol::V1);
        let header = TransferHeader { size: size as u64, address: BASE, operation, protocol };
        writer.write_all(&header.encode()).await.unwrap();
        writer.write_all(&bytes).await.unwrap();
        let mut read = vec![0; size];
        reader.read_mapped(&mapping, BASE, &mut [&mut read], |_| ()).await.unwrap();
        assert!(read == bytes, "round {round}");
    }
}

#[tokio::test]
async fn memory_is_shared_with_its_own_clients_only() {
    let node = SharedTestNode::start(false).await;
    let address = node.sharing.address();
    let refusal = |address: &SharedMemoryAddress, start| {
        SharedMappings::default().get(address, start).unwrap_err().to_string()
    };
    let other = SharedMemoryAddress { process: "0".to_owned(), ..address.clone() };
    assert!(refusal(&other, BASE).contains("another process"));
    assert!(refusal(address, BASE - 1).contains("no segment"));
    assert!(refusal(address, BASE + SIZE as u64).contains("no segment"));
    let nowhere = SharedMemoryAddress { socket: "@moongate-nowhere".to_owned(), ..address.clone() };
    assert!(refusal(&nowhere, BASE).contains("cannot connect"));

    let name = address.socket.trim_start_matches('@');
    let socket = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let silent = PacketSocket::connect(&socket).unwrap();
    let garbage = PacketSocket::connect(&socket).unwrap();
    garbage.send(&"what", None).unwrap();
    assert!(garbage.receive::<serde_json::Value>().is_err(), "its connection is closed");
    assert!(node.map().contains(BASE, SIZE as u64), "others are served meanwhile");
    drop(silent);

    let first = node.mappings.get(address, BASE).unwrap();
    assert!(first.ptr_eq(&node.mappings.clone().get(address, BASE + 5).unwrap()), "mapped once");
}

#[tokio::test]
async fn memory_is_unmapped_when_its_node_or_client_ends() {
    let node = SharedTestNode::start(false).await;
    let mapping = node.mappings.get(node.sharing.address(), BASE).unwrap();
    let in_use = mapping.upgrade().unwrap();
    drop(node.sharing);
    // A transfer in progress still has it.
    assert!(mapping.upgrade().is_some());
    drop(in_use);
    wait_until(|| mapping.strong_count() == 0).await;

    let node = SharedTestNode::start(false).await;
    let mapping = node.mappings.get(node.sharing.address(), BASE).unwrap();
    assert!(mapping.upgrade().is_some());
    drop(node.mappings);
    wait_until(|| mapping.strong_count() == 0).await;
}

#[test]
fn memory_that_can_shrink_is_not_mapped() {
    struct Unsealed;
    impl SharedMemory for Unsealed {
        fn shared_segment(&self, _: u64) -> Option<SharedSegment> {
            let fd = rustix::fs::memfd_create("moongate-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, 4096).unwrap();
            Some(SharedSegment { id: MappingId::new(1), base: BASE, size: 4096, fd: Arc::new(fd) })
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shared.sock").to_string_lossy().into_owned();
    let mut servers = Vec::new();
    for _ in 0..2 {
        // The second server replaces the file of the first.
        let server =
            SharedMemoryServer::start(&path, SharedMemoryUsers::ByFilePermissions, Arc::new(Unsealed))
                .unwrap();
        let error = SharedMappings::default().get(server.address(), BASE).unwrap_err().to_string();
        assert!(error.contains("not sealed"), "{error}");
        servers.push(server);
    }
    std::fs::write(folder.path().join("file"), "keep").unwrap();
    let path = folder.path().join("file").to_string_lossy().into_owned();
    let started = SharedMemoryServer::start(&path, SharedMemoryUsers::ByFilePermissions, Arc::new(Unsealed));
    assert!(started.is_err(), "another kind of file is not replaced");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "keep");
}
