//! A holder and those who ask it, over its socket.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use moongate_memory::holder::{Error, Holder, Keeper, MAX_KEPT, Stopper};
use moongate_memory::ledger::{self, Identity};
use moongate_memory::numa::Placement;
use moongate_memory::segment;
use moongate_memory::{Crc32c, Keep, Pages, Region, Segment, Wanted, memfd};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

const MIB: u64 = 1 << 20;

/// A holder in a thread, stopped when dropped.
struct Running {
    path: PathBuf,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn at(path: &Path) -> Self {
        let keeper = Keeper::bind(path, 100 * MIB).unwrap();
        let stopper = keeper.stopper();
        Self { path: path.to_owned(), stopper, thread: Some(thread::spawn(|| keeper.run())) }
    }

    fn holder(&self) -> Holder {
        Holder::at(&self.path)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn wanted(keep: Keep, size: u64) -> Wanted {
    Wanted { keep, label: "segment".into(), size, pages: Pages::Normal, placement: Placement::Anywhere }
}

fn named(name: &str) -> impl FnOnce(u64) -> Identity {
    let name = name.to_owned();
    |base| Identity { segment: [1, 2], client: [3, 4], name, base, size: 0 }
}

fn write(segment: &Segment, offset: u64, bytes: &[u8]) {
    let writing = segment.ledger.begin(offset, bytes.len() as u64).unwrap();
    segment.region.write_at(offset, bytes).unwrap();
    writing.finish(Crc32c::of(bytes));
}

#[test]
fn memory_stays_while_its_users_come_and_go() {
    let folder = tempfile::tempdir().unwrap();
    let running = Running::at(&folder.path().join("holder"));
    let holder = running.holder();
    let first = holder.memory("a", MIB, Pages::Normal).unwrap();
    assert!(first.fresh);
    Region::from_fd(first.fd, MIB, None).unwrap().write_at(77, b"moon").unwrap();

    let again = holder.memory("a", MIB, Pages::Huge).unwrap();
    assert!(!again.fresh);
    let mut bytes = [0; 4];
    Region::from_fd(again.fd, MIB, None).unwrap().read_at(77, &mut bytes).unwrap();
    assert_eq!(&bytes, b"moon");

    let other = holder.memory("a", 2 * MIB, Pages::Normal).unwrap_err();
    assert!(matches!(other, Error::Length { kept: MIB, asked } if asked == 2 * MIB), "{other}");
    assert_eq!(holder.names().unwrap(), ["a"]);
    holder.forget("a").unwrap();
    holder.forget("a").unwrap();
    assert!(holder.memory("a", 2 * MIB, Pages::Normal).unwrap().fresh);
}

#[test]
fn who_connects_while_nobody_accepts_waits() {
    let folder = tempfile::tempdir().unwrap();
    let running = Running::at(&folder.path().join("holder"));
    let holder = running.holder();
    let any: SocketAddr = ([127, 0, 0, 1], 0).into();
    let first = holder.listener("data", any).unwrap();
    let address = first.local_addr().unwrap();
    drop(first);

    let mut client = TcpStream::connect(address).unwrap();
    client.write_all(b"hello").unwrap();
    for asked in [any, address] {
        assert_eq!(holder.listener("data", asked).unwrap().local_addr().unwrap(), address);
    }
    let (mut accepted, _) = holder.listener("data", any).unwrap().accept().unwrap();
    let mut bytes = [0; 5];
    accepted.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");

    // Another address is another socket; memory is not one.
    let moved = holder.listener("data", ([127, 0, 0, 2], 0).into()).unwrap().local_addr().unwrap();
    assert_ne!(moved.ip(), address.ip());
    assert!(holder.memory("data", MIB, Pages::Normal).is_err());
    holder.memory("a", MIB, Pages::Normal).unwrap();
    assert!(holder.listener("a", any).is_err());
    // An address that cannot be listened at is told.
    let told = holder.listener("x", ([192, 0, 2, 1], 0).into()).unwrap_err().to_string();
    assert!(told.contains("192.0.2.1"), "{told}");
}

#[test]
fn one_holder_at_a_path_and_a_killed_one_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("holder");
    let running = Running::at(&path);
    assert!(matches!(Keeper::bind(&path, MIB), Err(Error::InUse(_))));
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    drop(running);
    assert!(!path.exists());
    let away = Holder::at(&path).names().unwrap_err();
    assert!(matches!(away, Error::Away { .. }), "{away}");
    // One that was killed leaves its file.
    let stale = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&stale, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    drop(stale);
    assert_eq!(Running::at(&path).holder().names().unwrap(), [""; 0]);
    assert!(Keeper::bind(&folder.path().join("no/folder"), MIB).is_err());
}

#[test]
fn a_new_holder_is_given_what_its_user_still_has() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("holder");
    let running = Running::at(&path);
    let memory = running.holder().memory("a", MIB, Pages::Normal).unwrap();
    drop(running);
    let running = Running::at(&path);
    running.holder().give("a", MIB, &memory.fd).unwrap();
    assert!(running.holder().give("a", MIB, &memory.fd).is_err(), "kept already");
    assert!(!running.holder().memory("a", MIB, Pages::Normal).unwrap().fresh);
}

#[test]
fn what_is_kept_has_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let running = Running::at(&folder.path().join("holder"));
    let holder = running.holder();
    holder.memory("large", 60 * MIB, Pages::Normal).unwrap();
    for (name, len) in [("more", 41 * MIB), ("most", u64::MAX), ("", 1), (&*"n".repeat(129), 1), ("\0", 1)] {
        assert!(
            matches!(holder.memory(name, len, Pages::Normal), Err(Error::Refused { .. })),
            "{name:?} {len}"
        );
    }
    assert!(holder.memory("more", 40 * MIB, Pages::Normal).is_ok());
    for number in 2..MAX_KEPT {
        holder.listener(&format!("{number:0>128}"), ([127, 0, 0, 1], 0).into()).unwrap();
    }
    let full = holder.listener("one more", ([127, 0, 0, 1], 0).into()).unwrap_err();
    assert!(matches!(full, Error::Refused { .. }), "{full}");
    assert_eq!(holder.names().unwrap().len(), MAX_KEPT);
}

#[test]
fn nonsense_is_answered_and_does_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("holder");
    let running = Running::at(&path);
    let connect = || {
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        socket
    };
    for packet in [&b"x"[..], b"{\"memory\":{\"name\":5}}", b"\"dance\"", &[b'['; 9000]] {
        let socket = connect();
        rustix::net::send(&socket, packet, SendFlags::empty()).unwrap();
        let mut answer = [0; 4096];
        let (got, _) = rustix::net::recv(&socket, &mut answer[..], rustix::net::RecvFlags::empty()).unwrap();
        let answer = String::from_utf8(answer[..got].to_vec()).unwrap();
        assert!(answer.contains("refused") || answer.is_empty(), "{answer}");
    }
    // Too long, and nothing at all.
    rustix::net::send(connect(), &vec![b' '; 100_000], SendFlags::empty()).unwrap();
    drop(connect());
    assert_eq!(running.holder().names().unwrap(), [""; 0]);
}

fn goes_on(keep: &Keep) {
    let segment = Segment::open(&wanted(keep.clone(), 4 * MIB), named("a")).unwrap();
    assert!(!segment.kept);
    write(&segment, 100, b"moon");
    let base = segment.region.base();
    assert_eq!(segment.ledger.identity(), Identity { size: 4 * MIB, ..named("a")(base) });
    let twice = Segment::open(&wanted(keep.clone(), 4 * MIB), named("b"));
    assert!(matches!(twice, Err(segment::Error::Ledger(ledger::Error::InUse))), "{twice:?}");
    drop(segment);

    let segment = Segment::open(&wanted(keep.clone(), 4 * MIB), named("b")).unwrap();
    assert!(segment.kept);
    assert_eq!(segment.region.base(), base);
    assert_eq!(segment.ledger.identity().name, "a");
    let mut bytes = [0; 4];
    segment.region.read_at(100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"moon");
    assert_eq!(segment.ledger.find(100, 4).map(|entry| entry.crc), Some(Crc32c::of(b"moon")));
    drop(segment);

    let segment = Segment::open(&wanted(keep.clone(), 6 * MIB), named("c")).unwrap();
    assert!(!segment.kept, "of another size");
    assert_eq!(segment.ledger.identity().name, "c");
    assert_eq!(segment.ledger.counts().entries, 0);
}

#[test]
fn a_segment_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let running = Running::at(&folder.path().join("holder"));
    goes_on(&Keep::Holder(running.holder()));
    goes_on(&Keep::Folder(folder.path().to_owned()));
}

#[test]
fn half_a_segment_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let running = Running::at(&folder.path().join("holder"));
    let keep = Keep::Holder(running.holder());
    for lost in ["segment", "segment.ledger"] {
        write(&Segment::open(&wanted(keep.clone(), MIB), named("a")).unwrap(), 0, b"moon");
        running.holder().forget(lost).unwrap();
        let segment = Segment::open(&wanted(keep.clone(), MIB), named("b")).unwrap();
        assert!(!segment.kept, "without its {lost}");
        assert_eq!(segment.ledger.counts().entries, 0);
    }
    let keep = Keep::Folder(folder.path().to_owned());
    for lost in ["segment.segment", "segment.ledger"] {
        write(&Segment::open(&wanted(keep.clone(), MIB), named("a")).unwrap(), 0, b"moon");
        std::fs::remove_file(folder.path().join(lost)).unwrap();
        assert!(!Segment::open(&wanted(keep.clone(), MIB), named("b")).unwrap().kept, "without {lost}");
    }
}

#[test]
fn a_process_of_its_own_keeps_nothing() {
    let open = || Segment::open(&wanted(Keep::Process, MIB), named("a")).unwrap();
    let (one, two) = (open(), open());
    write(&one, 0, b"moon");
    assert!(!two.kept);
    assert_eq!(two.ledger.counts().entries, 0);
    let (fd, _) = memfd("unrelated", MIB, Pages::Normal).unwrap();
    assert_ne!(Region::from_fd(fd, MIB, Some(one.region.base())).unwrap().base(), one.region.base());
}
