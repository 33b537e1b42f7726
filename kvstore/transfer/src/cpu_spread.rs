//! Keeps a reader and a node on the same machine on different cores.
//!
//! Each wakes the other, and the kernel tends to run a woken thread on the waker's core. On a machine whose cores are all briefly busy,
//! both get stuck on one core: they alternate where one could send while the other receives, which takes up to three times as long, until
//! the next load balancing.

use std::io;

use moongate_runtime::net::TcpStream;
use rustix::thread::{sched_getaffinity, sched_getcpu, sched_setaffinity};
#[cfg(not(feature = "simulation"))]
use socket2::SockRef;

/// Smaller transfers end before a move pays off.
const MIN_BYTES: usize = 256 << 10;
/// Maximum number of checks skipped in a row after moves that did not help.
const MAX_SKIPPED: u32 = 64;

/// Per-connection state: whether the peer is local, and the backoff after useless moves.
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

    /// With `bytes` still to receive: moves this thread to another core if the peer sent its last bytes from this one.
    pub(crate) fn spread_if_colocated(&mut self, stream: &TcpStream, bytes: usize) {
        if !self.is_local || bytes < MIN_BYTES {
            return;
        }
        if self.skipped < self.skip {
            self.skipped += 1;
            return;
        }
        let is_same = is_sent_from_this_core(stream);
        // If the last move did not help, the other cores are busy too.
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

/// Moves this thread to another core of its affinity mask, then restores the mask. Returns the new core, or `None` if there is no other
/// core.
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

    /// Pins the current thread to its core.
    fn pin_to_core() {
        let mut only = CpuSet::new();
        only.set(sched_getcpu());
        sched_setaffinity(None, &only).unwrap();
    }

    #[test]
    fn a_thread_leaves_its_core_and_may_come_back() {
        // On a separate thread, so that no other test is moved.
        let moves = || {
            let before = sched_getaffinity(None).unwrap();
            let moved_to = leave_core().unwrap();
            assert_eq!(moved_to.is_some_and(|core| before.is_set(core)), before.count() > 1);
            assert_eq!(sched_getaffinity(None).unwrap(), before);
            pin_to_core();
            assert_eq!(leave_core().unwrap(), None, "there is no other core");
        };
        std::thread::spawn(moves).join().unwrap();
    }

    #[test]
    fn only_a_local_peer_on_the_same_core_causes_a_move() {
        let check_spread = async || {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let mut far = listener.accept().await.unwrap().0;
            far.write_all(b"bytes").await.unwrap();
            near.read_exact(&mut [0; 5]).await.unwrap();
            let mut spreader = CpuSpreader::new(&near);
            spreader.spread_if_colocated(&near, MIN_BYTES - 1);
            assert!(!spreader.has_moved, "the transfer is too small");
            for skip in [0, 1, 1, 3] {
                spreader.spread_if_colocated(&near, MIN_BYTES);
                assert_eq!((spreader.has_moved, spreader.skip), (true, skip));
            }
            let mut remote = CpuSpreader { is_local: false, ..CpuSpreader::new(&near) };
            remote.spread_if_colocated(&near, MIN_BYTES);
            assert!(!remote.has_moved);
        };
        let isolated = move || {
            pin_to_core();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(check_spread());
        };
        std::thread::spawn(isolated).join().unwrap();
    }
}
