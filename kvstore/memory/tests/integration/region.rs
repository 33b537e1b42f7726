//! All types of regions, with real sockets and files.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use moongate_memory::numa::NumaPlacement;
use moongate_memory::{Crc32c, MappedRegion, PageMode, RegionError, memfd};

const MIB: u64 = 1 << 20;

/// Within this time a thread has received and acknowledged bytes, unless it waits for more of them.
const ACKNOWLEDGED: Duration = Duration::from_secs(10);

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index ^ (index >> 8) ^ (index >> 15)) as u8).collect()
}

fn bytes(region: &MappedRegion, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    region.read_at(offset, &mut out).unwrap();
    out
}

/// One region of each type.
fn kinds(len: u64) -> Vec<MappedRegion> {
    let folder = tempfile::tempdir().unwrap();
    vec![
        MappedRegion::anonymous(len, PageMode::Normal).unwrap(),
        MappedRegion::anonymous(len, PageMode::Transparent).unwrap(),
        MappedRegion::anonymous(len, PageMode::Huge).unwrap(),
        MappedRegion::shared("moongate-test", len, PageMode::Huge).unwrap().0,
        MappedRegion::file(&folder.path().join("region"), len).unwrap(),
    ]
}

#[test]
fn bytes_are_written_and_read_in_every_type() {
    for region in kinds(3 * MIB + 5) {
        let written = pattern(MIB as usize);
        region.write_at(2 * MIB + 5, &written).unwrap();
        assert_eq!(bytes(&region, 2 * MIB + 5, MIB as usize), written);
        assert_eq!(region.crc32c(2 * MIB + 5, MIB).unwrap(), Crc32c::of(&written));
        assert_eq!(bytes(&region, 0, 100), [0; 100]);
        assert_eq!(region.len(), 3 * MIB + 5);
        region.set_placement(NumaPlacement::Node(0));
        region.set_placement(NumaPlacement::Spread);
    }
}

#[test]
fn accesses_beyond_the_end_are_rejected() {
    let (mut near, far) = pair();
    near.write_all(&[1; 64]).unwrap();
    for region in kinds(5000) {
        for (offset, len) in
            [(0, 5001), (5000, 1), (4999, 2), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)]
        {
            assert!(region.check(offset, len).is_err(), "{len} at {offset}");
            assert!(region.crc32c(offset, len).is_err());
            assert!(region.receive(&far, offset, len).is_err());
            assert!(region.receive_exact(&far, offset, len).is_err());
            assert!(region.receive_exact_crc(&far, offset, len).is_err());
            assert!(region.send(&far, offset, len).is_err());
            assert!(region.send_all(&far, offset, len).is_err());
            assert!(region.send_all_crc(&far, offset, len).is_err());
        }
        assert!(region.write_at(4999, &[1, 2]).is_err());
        assert!(region.read_at(4999, &mut [1, 2]).is_err());
        assert_eq!(bytes(&region, 4990, 10), [0; 10], "nothing was written");
        assert!(region.check(5000, 0).is_ok());
    }
    let mut remaining = Vec::new();
    drop(near);
    (&far).read_to_end(&mut remaining).unwrap();
    assert_eq!(remaining, [1; 64], "nothing was read from the socket");
}

#[test]
fn impossible_lengths_are_rejected() {
    for len in [0, u64::MAX, u64::MAX >> 1] {
        assert!(MappedRegion::anonymous(len, PageMode::Normal).is_err());
        assert!(MappedRegion::shared("moongate-test", len, PageMode::Normal).is_err());
    }
}

#[test]
fn sockets_write_to_and_read_from_the_mapping() {
    let sent = pattern(10 * MIB as usize + 3);
    for region in kinds(11 * MIB) {
        let region = Arc::new(region);
        for checked in [false, true] {
            let (mut near, far) = pair();
            let (region, expected) = (Arc::clone(&region), sent.clone());
            let len = sent.len() as u64;
            let node = thread::spawn(move || {
                if checked {
                    let crc = region.receive_exact_crc(&far, 17, len).unwrap();
                    assert_eq!(crc, Crc32c::of(&expected));
                    assert_eq!(region.send_all_crc(&far, 17, len).unwrap(), crc);
                } else {
                    region.receive_exact(&far, 17, len).unwrap();
                    region.send_all(&far, 17, len).unwrap();
                }
            });
            near.write_all(&sent).unwrap();
            let mut received = Vec::new();
            near.read_to_end(&mut received).unwrap();
            node.join().unwrap();
            assert!(received == sent, "the bytes are not the same, checked: {checked}");
        }
        // Neighbouring bytes are untouched.
        assert_eq!(bytes(&region, 0, 17), [0; 17]);
        assert_eq!(bytes(&region, 17 + sent.len() as u64, 100), [0; 100]);
    }
}

#[test]
fn bytes_after_a_large_body_are_received_one_by_one() {
    let region = Arc::new(MappedRegion::anonymous(2 * MIB, PageMode::Normal).unwrap());
    for checked in [false, true] {
        let (mut near, mut far) = pair();
        near.set_read_timeout(Some(ACKNOWLEDGED)).unwrap();
        let region = Arc::clone(&region);
        let node = thread::spawn(move || {
            if checked {
                region.receive_exact_crc(&far, 0, MIB).unwrap();
            } else {
                region.receive_exact(&far, 0, MIB).unwrap();
            }
            assert_eq!(region.receive(&far, MIB, 10).unwrap(), 1);
            far.write_all(&[1]).unwrap();
        });
        near.write_all(&pattern(MIB as usize)).unwrap();
        thread::sleep(Duration::from_millis(50));
        near.write_all(&[9]).unwrap();
        near.read_exact(&mut [0]).expect("the byte was received");
        node.join().unwrap();
    }
}

/// Around the length from which a receiving thread sleeps until many bytes have arrived.
#[test]
fn bodies_may_arrive_in_small_pieces() {
    let region = Arc::new(MappedRegion::anonymous(2 * MIB, PageMode::Normal).unwrap());
    for len in [MIB / 2 - 1, MIB / 2, MIB / 2 + 1, MIB + 5] {
        let (mut near, mut far) = pair();
        near.set_read_timeout(Some(ACKNOWLEDGED)).unwrap();
        let sent = pattern(usize::try_from(len).unwrap());
        let node = thread::spawn({
            let region = Arc::clone(&region);
            move || {
                let crc = region.receive_exact_crc(&far, 3, len).unwrap();
                far.write_all(&[1]).unwrap();
                crc
            }
        });
        for piece in sent.chunks(100 << 10) {
            near.write_all(piece).unwrap();
            thread::sleep(Duration::from_millis(2));
        }
        near.read_exact(&mut [0]).expect("the body was received");
        assert_eq!(node.join().unwrap(), Crc32c::of(&sent), "{len} bytes");
    }
}

#[test]
fn slow_and_closed_peers_return_different_errors() {
    for (sent, expected) in [(1000, 2000), (700 << 10, MIB), (100 << 10, MIB)] {
        let region = MappedRegion::anonymous(MIB, PageMode::Normal).unwrap();
        let (mut near, far) = pair();
        near.write_all(&vec![7; sent]).unwrap();
        far.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let slow = region.receive_exact(&far, 0, expected).unwrap_err();
        assert_eq!(slow.kind(), std::io::ErrorKind::WouldBlock);
        assert_eq!(bytes(&region, 0, sent), vec![7; sent], "received bytes are stored");
        // A thread that sleeps until more has arrived is woken by the end, too.
        far.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let close = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            drop(near);
        });
        let closed = region.receive_exact_crc(&far, 0, expected).unwrap_err();
        assert_eq!(closed.kind(), std::io::ErrorKind::UnexpectedEof);
        close.join().unwrap();
    }
}

#[test]
fn sending_to_a_closed_peer_is_an_error() {
    let region = MappedRegion::anonymous(MIB, PageMode::Normal).unwrap();
    let (near, far) = pair();
    drop(near);
    let outcome = (0..1000).try_for_each(|_| region.send_all(&far, 0, MIB));
    assert!(outcome.is_err());
}

#[test]
fn a_file_keeps_its_bytes_and_its_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    MappedRegion::file(&path, MIB).unwrap().write_at(MIB - 5, b"moons").unwrap();
    assert_eq!(bytes(&MappedRegion::file(&path, MIB).unwrap(), MIB - 5, 5), b"moons");
    let Err(RegionError::Length { found, required, .. }) = MappedRegion::file(&path, 2 * MIB) else {
        unreachable!("another length")
    };
    assert_eq!((found, required), (MIB, 2 * MIB));
    assert!(MappedRegion::file(&folder.path().join("no/such/folder"), MIB).is_err());
}

#[test]
fn shared_memory_lives_as_long_as_its_descriptor() {
    let (region, fd) = MappedRegion::shared("moongate-test", MIB, PageMode::Normal).unwrap();
    region.write_at(100, b"moons").unwrap();
    let base = region.base();
    drop(region);
    let remapped = MappedRegion::from_fd(fd.try_clone().unwrap(), MIB, Some(base)).unwrap();
    assert_eq!(remapped.base(), base);
    assert_eq!(bytes(&remapped, 100, 5), b"moons");
    let second = MappedRegion::from_fd(fd, MIB, Some(base)).unwrap();
    assert_ne!(second.base(), base, "the address is taken");
    remapped.write_at(200, b"more").unwrap();
    assert_eq!(bytes(&second, 200, 4), b"more");
}

#[test]
fn mapping_beyond_the_memory_is_rejected() {
    let (fd, _) = memfd("moongate-test", MIB, PageMode::Normal).unwrap();
    assert!(matches!(MappedRegion::from_fd(fd, MIB + 1, None), Err(RegionError::Length { .. })));
}
