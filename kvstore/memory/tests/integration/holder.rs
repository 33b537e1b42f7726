//! Holder server and clients over a real socket.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use moongate_memory::holder::{HolderClient, HolderError, HolderServer, HolderStopHandle, MAX_RESOURCES};
use moongate_memory::ledger::{self, SegmentIdentity};
use moongate_memory::numa::NumaPlacement;
use moongate_memory::segment;
use moongate_memory::{Crc32c, MappedRegion, PageMode, SegmentBacking, SegmentMemory, SegmentOptions, memfd};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

const MIB: u64 = 1 << 20;

/// A holder in a thread, stopped on drop.
struct TestHolder {
    path: PathBuf,
    stopper: HolderStopHandle,
    thread: Option<JoinHandle<()>>,
}

impl TestHolder {
    fn start(path: &Path) -> Self {
        let server = HolderServer::bind(path, 100 * MIB).unwrap();
        let stopper = server.stopper();
        Self { path: path.to_owned(), stopper, thread: Some(thread::spawn(|| server.run())) }
    }

    fn holder(&self) -> HolderClient {
        HolderClient::new(&self.path)
    }
}

impl Drop for TestHolder {
    fn drop(&mut self) {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn segment_options(backing: SegmentBacking, size: u64) -> SegmentOptions {
    SegmentOptions {
        backing,
        label: "segment".into(),
        size,
        pages: PageMode::Normal,
        placement: NumaPlacement::Anywhere,
        direct_writes: false,
    }
}

fn identity_of(name: &str) -> impl FnOnce(u64) -> SegmentIdentity {
    let name = name.to_owned();
    |base| SegmentIdentity { segment: [1, 2], client: [3, 4], name, base, size: 0 }
}

fn write(segment: &SegmentMemory, offset: u64, bytes: &[u8]) {
    let writing = segment.ledger.begin(offset, bytes.len() as u64).unwrap();
    segment.region.write_at(offset, bytes).unwrap();
    writing.finish(Crc32c::of(bytes));
}

#[test]
fn memory_outlives_its_clients() {
    let folder = tempfile::tempdir().unwrap();
    let running = TestHolder::start(&folder.path().join("holder"));
    let holder = running.holder();
    let first = holder.memory("a", MIB, PageMode::Normal).unwrap();
    assert!(first.is_new);
    MappedRegion::from_fd(first.fd, MIB, None).unwrap().write_at(77, b"moon").unwrap();

    let reopened = holder.memory("a", MIB, PageMode::Huge).unwrap();
    assert!(!reopened.is_new);
    let mut bytes = [0; 4];
    MappedRegion::from_fd(reopened.fd, MIB, None).unwrap().read_at(77, &mut bytes).unwrap();
    assert_eq!(&bytes, b"moon");

    let other = holder.memory("a", 2 * MIB, PageMode::Normal).unwrap_err();
    assert!(matches!(other, HolderError::Length { held: MIB, requested } if requested == 2 * MIB), "{other}");
    assert_eq!(holder.names().unwrap(), ["a"]);
    holder.release("a").unwrap();
    holder.release("a").unwrap();
    assert!(holder.memory("a", 2 * MIB, PageMode::Normal).unwrap().is_new);
}

#[test]
fn connections_wait_while_the_listener_is_not_served() {
    let folder = tempfile::tempdir().unwrap();
    let running = TestHolder::start(&folder.path().join("holder"));
    let holder = running.holder();
    let any: SocketAddr = ([127, 0, 0, 1], 0).into();
    let first = holder.listener("data", any).unwrap();
    let address = first.local_addr().unwrap();
    drop(first);

    let mut client = TcpStream::connect(address).unwrap();
    client.write_all(b"hello").unwrap();
    for requested in [any, address] {
        assert_eq!(holder.listener("data", requested).unwrap().local_addr().unwrap(), address);
    }
    let (mut accepted, _) = holder.listener("data", any).unwrap().accept().unwrap();
    let mut bytes = [0; 5];
    accepted.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");

    // Another address means a new socket; a socket is not memory.
    let moved = holder.listener("data", ([127, 0, 0, 2], 0).into()).unwrap().local_addr().unwrap();
    assert_ne!(moved.ip(), address.ip());
    assert!(holder.memory("data", MIB, PageMode::Normal).is_err());
    holder.memory("a", MIB, PageMode::Normal).unwrap();
    assert!(holder.listener("a", any).is_err());
    // The error names an address that cannot be bound.
    let error = holder.listener("x", ([192, 0, 2, 1], 0).into()).unwrap_err().to_string();
    assert!(error.contains("192.0.2.1"), "{error}");
}

#[test]
fn one_holder_per_path_and_a_killed_one_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("holder");
    let running = TestHolder::start(&path);
    assert!(matches!(HolderServer::bind(&path, MIB), Err(HolderError::InUse(_))));
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    drop(running);
    assert!(!path.exists());
    let error = HolderClient::new(&path).names().unwrap_err();
    assert!(matches!(error, HolderError::Unreachable { .. }), "{error}");
    // A killed holder leaves its socket file.
    let stale = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&stale, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    drop(stale);
    assert_eq!(TestHolder::start(&path).holder().names().unwrap(), [""; 0]);
    assert!(HolderServer::bind(&folder.path().join("no/folder"), MIB).is_err());
}

#[test]
fn content_is_dropped_when_direct_writes_are_turned_on_or_off() {
    let folder = tempfile::tempdir().unwrap();
    let running = TestHolder::start(&folder.path().join("holder"));
    let open = |direct_writes| {
        let options = segment_options(SegmentBacking::Holder(running.holder()), MIB);
        let options = SegmentOptions { direct_writes, ..options };
        SegmentMemory::open(&options, |base| SegmentIdentity {
            segment: [fastrand::u64(..), 2],
            ..identity_of("node")(base)
        })
        .unwrap()
    };
    let mut last = open(false);
    write(&last, 0, b"moon");
    for direct_writes in [false, true, true, false] {
        let (before, had_direct_writes) = (last.ledger.identity(), last.ledger.has_direct_writes());
        drop(last);
        last = open(direct_writes);
        let is_kept = direct_writes == had_direct_writes;
        assert_eq!((last.is_restored, last.ledger.identity() == before), (is_kept, is_kept));
        assert_eq!(last.ledger.has_direct_writes(), direct_writes);
        // An object catalog needs a ledger.
        assert_eq!(last.ledger.catalog_counts().is_none(), direct_writes);
    }
    assert!(!last.ledger.covers(0, 4));
}

#[test]
fn memory_can_be_handed_to_a_restarted_holder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("holder");
    let running = TestHolder::start(&path);
    let memory = running.holder().memory("a", MIB, PageMode::Normal).unwrap();
    drop(running);
    let running = TestHolder::start(&path);
    running.holder().hand_over("a", MIB, &memory.fd).unwrap();
    assert!(running.holder().hand_over("a", MIB, &memory.fd).is_err(), "already exists");
    assert!(!running.holder().memory("a", MIB, PageMode::Normal).unwrap().is_new);
}

#[test]
fn names_sizes_and_counts_are_limited() {
    let folder = tempfile::tempdir().unwrap();
    let running = TestHolder::start(&folder.path().join("holder"));
    let holder = running.holder();
    holder.memory("large", 60 * MIB, PageMode::Normal).unwrap();
    for (name, len) in [("more", 41 * MIB), ("most", u64::MAX), ("", 1), (&*"n".repeat(129), 1), ("\0", 1)] {
        assert!(
            matches!(holder.memory(name, len, PageMode::Normal), Err(HolderError::Refused { .. })),
            "{name:?} {len}"
        );
    }
    assert!(holder.memory("more", 40 * MIB, PageMode::Normal).is_ok());
    for number in 2..MAX_RESOURCES {
        holder.listener(&format!("{number:0>128}"), ([127, 0, 0, 1], 0).into()).unwrap();
    }
    let full = holder.listener("one more", ([127, 0, 0, 1], 0).into()).unwrap_err();
    assert!(matches!(full, HolderError::Refused { .. }), "{full}");
    assert_eq!(holder.names().unwrap().len(), MAX_RESOURCES);
}

#[test]
fn invalid_requests_are_rejected_without_effect() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("holder");
    let running = TestHolder::start(&path);
    let connect = || {
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        socket
    };
    for packet in [&b"x"[..], b"{\"memory\":{\"name\":5}}", b"\"dance\"", &[b'['; 9000]] {
        let socket = connect();
        rustix::net::send(&socket, packet, SendFlags::empty()).unwrap();
        let mut response = [0; 4096];
        let (received, _) =
            rustix::net::recv(&socket, &mut response[..], rustix::net::RecvFlags::empty()).unwrap();
        let response = String::from_utf8(response[..received].to_vec()).unwrap();
        assert!(response.contains("refused") || response.is_empty(), "{response}");
    }
    // A packet that is too long, and an empty connection.
    rustix::net::send(connect(), &vec![b' '; 100_000], SendFlags::empty()).unwrap();
    drop(connect());
    assert_eq!(running.holder().names().unwrap(), [""; 0]);
}

fn check_restored(backing: &SegmentBacking) {
    let segment = SegmentMemory::open(&segment_options(backing.clone(), 4 * MIB), identity_of("a")).unwrap();
    assert!(!segment.is_restored);
    write(&segment, 100, b"moon");
    let base = segment.region.base();
    assert_eq!(segment.ledger.identity(), SegmentIdentity { size: 4 * MIB, ..identity_of("a")(base) });
    let twice = SegmentMemory::open(&segment_options(backing.clone(), 4 * MIB), identity_of("b"));
    assert!(matches!(twice, Err(segment::SegmentError::Ledger(ledger::LedgerError::InUse))), "{twice:?}");
    drop(segment);

    let segment = SegmentMemory::open(&segment_options(backing.clone(), 4 * MIB), identity_of("b")).unwrap();
    assert!(segment.is_restored);
    assert_eq!(segment.region.base(), base);
    assert_eq!(segment.ledger.identity().name, "a");
    let mut bytes = [0; 4];
    segment.region.read_at(100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"moon");
    assert_eq!(segment.ledger.find(100, 4).map(|entry| entry.crc), Some(Crc32c::of(b"moon")));
    drop(segment);

    let segment = SegmentMemory::open(&segment_options(backing.clone(), 6 * MIB), identity_of("c")).unwrap();
    assert!(!segment.is_restored, "another size");
    assert_eq!(segment.ledger.identity().name, "c");
    assert_eq!(segment.ledger.counts().entries, 0);
}

#[test]
fn a_segment_is_restored_from_its_backing() {
    let folder = tempfile::tempdir().unwrap();
    let running = TestHolder::start(&folder.path().join("holder"));
    check_restored(&SegmentBacking::Holder(running.holder()));
    check_restored(&SegmentBacking::Folder(folder.path().to_owned()));
}

#[test]
fn a_segment_without_memory_or_ledger_is_new() {
    let folder = tempfile::tempdir().unwrap();
    let running = TestHolder::start(&folder.path().join("holder"));
    let backing = SegmentBacking::Holder(running.holder());
    for lost in ["segment", "segment.ledger"] {
        write(
            &SegmentMemory::open(&segment_options(backing.clone(), MIB), identity_of("a")).unwrap(),
            0,
            b"moon",
        );
        running.holder().release(lost).unwrap();
        let segment = SegmentMemory::open(&segment_options(backing.clone(), MIB), identity_of("b")).unwrap();
        assert!(!segment.is_restored, "without its {lost}");
        assert_eq!(segment.ledger.counts().entries, 0);
    }
    let backing = SegmentBacking::Folder(folder.path().to_owned());
    for lost in ["segment.segment", "segment.ledger"] {
        write(
            &SegmentMemory::open(&segment_options(backing.clone(), MIB), identity_of("a")).unwrap(),
            0,
            b"moon",
        );
        std::fs::remove_file(folder.path().join(lost)).unwrap();
        assert!(
            !SegmentMemory::open(&segment_options(backing.clone(), MIB), identity_of("b"))
                .unwrap()
                .is_restored,
            "without {lost}"
        );
    }
}

#[test]
fn private_memory_is_never_restored() {
    let open =
        || SegmentMemory::open(&segment_options(SegmentBacking::Process, MIB), identity_of("a")).unwrap();
    let (first, second) = (open(), open());
    write(&first, 0, b"moon");
    assert!(!second.is_restored);
    assert_eq!(second.ledger.counts().entries, 0);
    let (fd, _) = memfd("unrelated", MIB, PageMode::Normal).unwrap();
    assert_ne!(
        MappedRegion::from_fd(fd, MIB, Some(first.region.base())).unwrap().base(),
        first.region.base()
    );
}
