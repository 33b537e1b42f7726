//! A reader and a node of the same machine on different cores.
//!
//! Each wakes the other up, and the kernel likes to run whom a thread wakes up on that thread's own core. On a machine whose
//! cores are all busy now and then they get stuck there: they take turns where one could send while the other receives,
//! which takes up to three times as long, until the next balancing.

use std::io;

use moongate_runtime::net::TcpStream;
use rustix::thread::{sched_getaffinity, sched_getcpu, sched_setaffinity};
#[cfg(not(feature = "simulation"))]
use socket2::SockRef;

/// What is shorter ends before it would pay.
const MIN_BYTES: usize = 256 << 10;
/// The most times in a row without a look, after moves that were in vain.
const MAX_SKIPPED: u32 = 64;

/// What a connection has learnt about where its peer runs.
#[derive(Debug)]
pub(crate) struct CpuSpreader {
    is_local: bool,
    skip: u32,
    skipped: u32,
    has_moved: bool,
}

impl CpuSpreader {
    pub(crate) fn new(stream: &TcpStream) -> Self {
        let addresses = stream.peer_addr().ok().zip(stream.local_addr().ok());
        let is_local =
            addresses.is_some_and(|(peer, own)| peer.ip().to_canonical() == own.ip().to_canonical());
        Self { is_local, skip: 0, skipped: 0, has_moved: false }
    }

    /// While so many `bytes` are still to come: moves this thread to another core if the peer has sent the last ones from this one.
    pub(crate) fn spread_if_colocated(&mut self, stream: &TcpStream, bytes: usize) {
        if !self.is_local || bytes < MIN_BYTES {
            return;
        }
        if self.skipped < self.skip {
            self.skipped += 1;
            return;
        }
        let is_same = is_sent_from_this_core(stream);
        // Where the last move did not help, the other cores are busy too.
        self.skip = if is_same && self.has_moved { (self.skip * 2 + 1).min(MAX_SKIPPED) } else { 0 };
        (self.skipped, self.has_moved) = (0, is_same && leave_core().is_ok());
    }
}

#[cfg(not(feature = "simulation"))]
fn is_sent_from_this_core(stream: &TcpStream) -> bool {
    SockRef::from(stream).cpu_affinity().is_ok_and(|peer| peer == sched_getcpu())
}

/// A simulation has one thread.
#[cfg(feature = "simulation")]
fn is_sent_from_this_core(_: &TcpStream) -> bool {
    false
}

/// Moves this thread to any other of the cores that it may use; then it may use all of them again. Returns where it went, if there
/// is another one.
fn leave_core() -> io::Result<Option<usize>> {
    let all = sched_getaffinity(None)?;
    let mut others = all;
    others.unset(sched_getcpu());
    if others.count() == 0 {
        return Ok(None);
    }
    sched_setaffinity(None, &others)?;
    let core = sched_getcpu();
    sched_setaffinity(None, &all)?;
    Ok(Some(core))
}

#[cfg(test)]
mod tests {
    use rustix::thread::CpuSet;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// From now on this thread runs on one core only.
    fn pin_to_core() {
        let mut one = CpuSet::new();
        one.set(sched_getcpu());
        sched_setaffinity(None, &one).unwrap();
    }

    #[test]
    fn a_thread_leaves_its_core_and_may_come_back() {
        // On a thread of its own, so that no other test is moved.
        let moves = || {
            let before = sched_getaffinity(None).unwrap();
            let went = leave_core().unwrap();
            assert_eq!(went.is_some_and(|core| before.is_set(core)), before.count() > 1);
            assert_eq!(sched_getaffinity(None).unwrap(), before);
            pin_to_core();
            assert_eq!(leave_core().unwrap(), None, "there is no other core");
        };
        std::thread::spawn(moves).join().unwrap();
    }

    #[test]
    fn a_peer_on_the_same_core_is_noticed_if_it_is_on_this_machine() {
        let looks = async || {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let mut far = listener.accept().await.unwrap().0;
            far.write_all(b"bytes").await.unwrap();
            near.read_exact(&mut [0; 5]).await.unwrap();
            let mut apart = CpuSpreader::new(&near);
            apart.spread_if_colocated(&near, MIN_BYTES - 1);
            assert!(!apart.has_moved, "it does not pay");
            for skip in [0, 1, 1, 3] {
                apart.spread_if_colocated(&near, MIN_BYTES);
                assert_eq!((apart.has_moved, apart.skip), (true, skip));
            }
            let mut remote = CpuSpreader { is_local: false, ..CpuSpreader::new(&near) };
            remote.spread_if_colocated(&near, MIN_BYTES);
            assert!(!remote.has_moved);
        };
        let alone = move || {
            pin_to_core();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(looks());
        };
        std::thread::spawn(alone).join().unwrap();
    }
}
