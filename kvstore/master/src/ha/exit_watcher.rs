//! A second process that releases the leader's lease as soon as the leader's process has died.
//!
//! Without it, the other masters have to wait until the lease expires. The leader reports each lease that it gets or releases on a pipe.
//! The kernel closes the pipe once all threads of the leader have ended, so that none of them can send a reply any more. A leader that
//! hangs, or whose machine or network fails, keeps the pipe open or takes the watcher with it: then the lease expires, as without watcher.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::coordinator::{HaCoordinator, LeaderTerm};

/// Maximum length of a line in bytes, of which a corrupt pipe could send any number.
const MAX_LINE: u64 = 128;
/// Pause between two attempts to release the lease.
const RETRY: Duration = Duration::from_millis(100);

/// Reports the lease that this master holds to its watcher.
#[derive(Default)]
pub struct LeaseReporter(Mutex<Option<Box<dyn Write + Send>>>);

impl LeaseReporter {
    /// Reports to the watcher that reads the other end of this pipe.
    pub fn new(pipe: impl Write + Send + 'static) -> Self {
        Self(Mutex::new(Some(Box::new(pipe))))
    }

    /// Reports the held lease; `None` after its release.
    pub(super) fn report(&self, held: Option<LeaderTerm>) {
        let mut watcher = self.0.lock();
        let Some(pipe) = watcher.as_mut() else { return };
        let LeaderTerm { term, lease } = held.unwrap_or(LeaderTerm { term: 0, lease: 0 });
        if let Err(error) = pipe.write_all(format!("{term} {lease}\n").as_bytes()).and_then(|()| pipe.flush())
        {
            tracing::warn!(%error, "the exit watcher has ended: if this master dies, its lease has to expire");
            *watcher = None;
        }
    }
}

/// Waits until the reporting process has died. Returns the lease that it held then.
///
/// # Errors
/// The pipe cannot be read, or has something else than leases.
pub fn wait_for_exit(mut pipe: impl BufRead) -> io::Result<Option<LeaderTerm>> {
    let (mut held, mut line) = (None, String::new());
    loop {
        line.clear();
        let length = io::Read::take(&mut pipe, MAX_LINE).read_line(&mut line)?;
        // A line that the process could not complete is dropped: the lease that it names was just granted, and expires.
        if length == 0 || !line.ends_with('\n') {
            return Ok(held);
        }
        let numbers = line.trim_end().split_once(' ').map(|(term, lease)| (term.parse(), lease.parse()));
        let Some((Ok(term), Ok(lease))) = numbers else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line has no lease"));
        };
        held = Some(LeaderTerm { term, lease }).filter(|held| held.term != 0);
    }
}

/// Releases the lease of a process that has died, with retries until it would have expired anyway. Returns whether it was released.
pub async fn release_lease(coordinator: &dyn HaCoordinator, held: LeaderTerm, lease: Duration) -> bool {
    let started = Instant::now();
    while started.elapsed() < lease {
        let attempt = async {
            let _ = coordinator.resign(held).await;
            coordinator.observe().await
        };
        if let Ok(Ok(view)) = timeout(lease, attempt).await
            && view.leader.is_none_or(|leader| leader.term != held.term)
        {
            return true;
        }
        sleep(RETRY).await;
    }
    false
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A pipe whose contents can be read.
    #[derive(Clone, Default)]
    struct SharedPipe(Arc<Mutex<Vec<u8>>>);

    impl Write for SharedPipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_last_reported_lease_is_held_at_the_exit() {
        let (first, second) = (LeaderTerm { term: 7, lease: -3 }, LeaderTerm { term: 9, lease: i64::MAX });
        for (reports, held) in [
            (&[][..], None),
            (&[Some(first)], Some(first)),
            (&[Some(first), None], None),
            (&[Some(first), None, Some(second)], Some(second)),
        ] {
            let pipe = SharedPipe::default();
            let reporter = LeaseReporter::new(pipe.clone());
            reports.iter().for_each(|report| reporter.report(*report));
            assert_eq!(wait_for_exit(&pipe.0.lock()[..]).unwrap(), held);
        }
    }

    #[test]
    fn incomplete_lines_are_dropped_and_others_rejected() {
        assert_eq!(wait_for_exit(&b"7 1\n9"[..]).unwrap(), Some(LeaderTerm { term: 7, lease: 1 }));
        let endless = vec![b'1'; 10_000];
        assert_eq!(wait_for_exit(&endless[..]).unwrap(), None);
        for wrong in ["\n", "7\n", "a b\n", "1 2 3\n"] {
            assert_eq!(wait_for_exit(wrong.as_bytes()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
