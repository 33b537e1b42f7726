//! A journal whose commits wait for the followers in the in-sync set.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

use super::fence::{LeaseFence, now};
use super::in_sync::InSyncTracker;
use super::member::{HaMember, InSyncSet};
use crate::durable::DurableJournal;
use crate::epochs::LogPosition;
use crate::journal::{DataDirStatus, Journal, MemoryJournal};
use crate::record;
use crate::state::AuxState;

/// How often a waiting commit checks whether this master is still the leader.
const LEADERSHIP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Records of a leader, buffered in memory for its followers, and written to its own log if it has one.
#[derive(Debug)]
pub struct ReplicatedJournal {
    facts: MemoryJournal,
    durable: Option<Arc<DurableJournal>>,
    /// No further record is written to `durable`.
    sealed: AtomicBool,
    /// Records of `durable` could not be read.
    damaged_log: AtomicBool,
    aux: Arc<AuxState>,
    fence: Arc<LeaseFence>,
    /// `None` while this master is not the leader.
    in_sync: Mutex<Option<InSyncTracker>>,
    progress: Condvar,
    /// Highest record that a commit waits for.
    commit_target: watch::Sender<u64>,
    /// Notified when the set to store may have changed.
    in_sync_changed: tokio::sync::Notify,
}

impl ReplicatedJournal {
    /// Records from number `next` on. About the newest `capacity` bytes are buffered in memory; `durable` is the log with the records
    /// before `next`.
    pub fn new(
        next: u64,
        capacity: usize,
        fence: Arc<LeaseFence>,
        aux: Arc<AuxState>,
        durable: Option<Arc<DurableJournal>>,
    ) -> Self {
        Self {
            facts: MemoryJournal::starting_at(next, capacity),
            durable,
            sealed: AtomicBool::new(false),
            damaged_log: AtomicBool::new(false),
            aux,
            fence,
            in_sync: Mutex::new(None),
            progress: Condvar::new(),
            commit_target: watch::Sender::new(next - 1),
            in_sync_changed: tokio::sync::Notify::new(),
        }
    }

    /// This master becomes leader and the only in-sync member. A new epoch starts.
    pub fn lead(&self, leader: &HaMember) {
        let id = fastrand::u64(..);
        let number = self.append(&record::epoch(id));
        self.aux.epochs.lock().begin(id, number);
        *self.in_sync.lock() = Some(InSyncTracker::new(leader.clone()));
    }

    /// This master is no longer the leader: waiting commits fail.
    pub fn step_down(&self) {
        *self.in_sync.lock() = None;
        self.progress.notify_all();
    }

    /// Stops writing to the log. Returns the number of its last record.
    pub fn seal(&self) -> u64 {
        self.facts.with_next(|next| {
            self.sealed.store(true, Relaxed);
            next - 1
        })
    }

    /// Stops reading the log for followers: some of its records are unreadable.
    pub fn mark_log_damaged(&self) {
        self.damaged_log.store(true, Relaxed);
    }

    /// The in-memory buffer with the newest records.
    pub fn facts(&self) -> &MemoryJournal {
        &self.facts
    }

    /// The log on disk, if there is one.
    pub fn durable(&self) -> Option<&DurableJournal> {
        self.durable.as_deref()
    }

    /// State outside the state machine.
    pub fn aux(&self) -> &Arc<AuxState> {
        &self.aux
    }

    /// Whether a follower with this last record only needs the later ones.
    pub fn can_resume_from(&self, position: LogPosition) -> bool {
        let next = self.facts.next();
        let is_available = |target: u64| {
            let in_log = !self.damaged_log.load(Relaxed)
                && self.durable.as_ref().is_some_and(|durable| durable.log().oldest() <= target);
            in_log || self.facts.read(target, |_, _| {}).is_some()
        };
        self.aux.epochs.lock().contains(next - 1, position) && is_available(position.number + 1)
    }

    /// Watches the highest record that a commit waits for.
    pub fn commit_target(&self) -> watch::Receiver<u64> {
        self.commit_target.subscribe()
    }

    /// As [`InSyncTracker::join`]. Returns whether this master is the leader.
    pub fn join(&self, member: &HaMember, acknowledged: u64) -> bool {
        let joined = self.with(|tracker| {
            // Read under the tracker's lock: commits of later records wait for this follower.
            let last = self.facts.next() - 1;
            tracker.join(member, acknowledged, last, now());
        });
        self.in_sync_changed.notify_one();
        joined.is_some()
    }

    /// As [`InSyncTracker::acknowledge`].
    pub fn acknowledge(&self, member: &HaMember, number: u64) -> bool {
        let is_required = self.with(|tracker| tracker.acknowledge(member, number, now())) == Some(true);
        self.progress.notify_all();
        is_required
    }

    /// As [`InSyncTracker::remove_silent`].
    pub fn remove_silent(&self, follower_timeout: Duration) -> Vec<HaMember> {
        self.with(|tracker| tracker.remove_silent(now(), follower_timeout)).unwrap_or_default()
    }

    /// As [`InSyncTracker::pending_in_sync`].
    pub fn pending_in_sync(&self) -> Option<InSyncSet> {
        self.with(InSyncTracker::pending_in_sync).flatten()
    }

    /// As [`InSyncTracker::confirm_in_sync`].
    pub fn confirm_in_sync(&self, members: InSyncSet) {
        self.with(|tracker| tracker.confirm_in_sync(members));
        self.progress.notify_all();
    }

    /// Waits until [`Self::pending_in_sync`] may have changed.
    pub async fn in_sync_changed(&self) {
        self.in_sync_changed.notified().await;
    }

    fn raise_commit_target(&self, number: u64) {
        self.commit_target.send_if_modified(|target| number > std::mem::replace(target, number.max(*target)));
    }

    fn with<T>(&self, update: impl FnOnce(&mut InSyncTracker) -> T) -> Option<T> {
        self.in_sync.lock().as_mut().map(update)
    }

    fn check(&self) -> io::Result<()> {
        if self.fence.is_open(now()) {
            Ok(())
        } else {
            Err(io::Error::other("this master is no longer the leader"))
        }
    }
}

impl Journal for ReplicatedJournal {
    fn append(&self, fact: &[u8]) -> u64 {
        // The lock gives the record the same number in both.
        self.facts.append_and(fact, || {
            if let Some(durable) = self.durable.as_ref().filter(|_| !self.sealed.load(Relaxed)) {
                durable.append(fact);
            }
        })
    }

    fn commit(&self, number: u64) -> io::Result<()> {
        let not_leader = || Err(io::Error::other("this master is no longer the leader"));
        if let Some(durable) = &self.durable {
            // Followers write the record at the same time.
            if self.with(|tracker| !tracker.is_acknowledged(number)) == Some(true) {
                self.raise_commit_target(number);
            }
            durable.commit(number)?;
        }
        let mut tracker = self.in_sync.lock();
        loop {
            match &*tracker {
                None => return not_leader(),
                Some(tracker) if tracker.is_acknowledged(number) => return self.check(),
                Some(_) => {}
            }
            self.check()?;
            self.raise_commit_target(number);
            self.progress.wait_for(&mut tracker, LEADERSHIP_CHECK_INTERVAL);
        }
    }

    fn may_reply(&self) -> io::Result<()> {
        self.check()?;
        self.durable.as_ref().map_or(Ok(()), |durable| durable.may_reply())
    }

    fn may_write(&self) -> bool {
        self.durable.as_ref().is_none_or(|durable| durable.may_write())
    }

    fn storage(&self) -> Option<DataDirStatus> {
        self.durable.as_ref()?.storage()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_wait_for_followers_and_fail_after_leadership() {
        let fence = Arc::new(LeaseFence::default());
        let journal = ReplicatedJournal::new(1, 1 << 20, Arc::clone(&fence), Arc::default(), None);
        let number = journal.append(b"fact");
        assert!(journal.commit(number).is_err());
        let [leader, other] = ["a", "b"].map(HaMember::new);
        journal.lead(&leader);
        assert!(journal.commit(number).is_err(), "the fence is closed");
        fence.extend(now() + Duration::from_secs(600));
        assert!(journal.commit(number).is_ok() && journal.may_reply().is_ok());
        journal.join(&other, number);
        let (second, third) = (journal.append(b"second"), journal.append(b"third"));
        let mut target = journal.commit_target();
        std::thread::scope(|scope| {
            let commit = scope.spawn(|| journal.commit(second));
            while *target.borrow_and_update() < second {
                std::thread::yield_now();
            }
            assert!(!commit.is_finished());
            journal.acknowledge(&other, second);
            assert!(commit.join().unwrap().is_ok());
            let commit = scope.spawn(|| journal.commit(third));
            journal.step_down();
            assert!(commit.join().unwrap().is_err());
        });
        fence.revoke();
        assert!(journal.may_reply().is_err());
    }
    #[test]
    fn memory_and_log_have_the_same_numbers_until_sealed() {
        let folder = tempfile::TempDir::new().unwrap();
        let durable = Arc::new(
            DurableJournal::begin(folder.path(), moongate_oplog::OplogOptions::default(), 41).unwrap(),
        );
        let fence = Arc::new(LeaseFence::default());
        fence.extend(now() + Duration::from_secs(600));
        let journal = ReplicatedJournal::new(41, 0, fence, Arc::default(), Some(Arc::clone(&durable)));
        journal.lead(&HaMember::new("a"));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..500).for_each(|number: u32| _ = journal.append(&number.to_le_bytes())));
            }
        });
        let last = journal.facts().next() - 1;
        journal.commit(last).unwrap();
        assert_eq!((last, durable.log().written()), (41 + 2000, last));
        let epoch = journal.aux().epochs.lock().current().unwrap();
        let at = |epoch, number| LogPosition { epoch, number };
        assert!(journal.can_resume_from(at(epoch, 41)), "records evicted from memory are in the log");
        assert!(
            !journal.can_resume_from(at(epoch, last + 1)) && !journal.can_resume_from(at(epoch ^ 1, last))
        );
        assert_eq!(journal.seal(), last);
        journal.append(b"late");
        assert_eq!(durable.log().next(), last + 1);
    }
}
