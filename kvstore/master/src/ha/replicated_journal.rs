//! A journal whose commits wait for those who follow.

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
use crate::journal::{DataDirStatus, Journal, MemoryJournal};
use crate::record;
use crate::state::AuxState;

/// How often a commit that waits looks whether this master still leads.
const LEADERSHIP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Records of a leader, kept in memory for those who follow it, and on its own disk if it has one.
#[derive(Debug)]
pub struct ReplicatedJournal {
    facts: MemoryJournal,
    durable: Option<Arc<DurableJournal>>,
    /// Nothing goes to `durable` any more.
    sealed: AtomicBool,
    /// Records of `durable` could not be read.
    damaged_log: AtomicBool,
    aux: Arc<AuxState>,
    fence: Arc<LeaseFence>,
    /// Nothing while this master does not lead.
    in_sync: Mutex<Option<InSyncTracker>>,
    progress: Condvar,
    /// The last record that somebody waits for.
    commit_target: watch::Sender<u64>,
    /// Told when the store has to list others than it does.
    in_sync_changed: tokio::sync::Notify,
}

impl ReplicatedJournal {
    /// Records from number `next` on, of which about the newest `capacity` bytes are kept in memory. `durable` is the log that has
    /// those before.
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

    /// This master leads from now on, and alone has all. Its epoch begins.
    pub fn lead(&self, me: &HaMember) {
        let id = fastrand::u64(..);
        let number = self.append(&record::epoch(id));
        self.aux.epochs.lock().begin(id, number);
        *self.in_sync.lock() = Some(InSyncTracker::new(me.clone()));
    }

    /// This master leads no more: whoever waits is refused.
    pub fn step_down(&self) {
        *self.in_sync.lock() = None;
        self.progress.notify_all();
    }

    /// Nothing is written to the log any more. Returns its last record.
    pub fn seal(&self) -> u64 {
        self.facts.with_next(|next| {
            self.sealed.store(true, Relaxed);
            next - 1
        })
    }

    /// Records of the log cannot be read, and are not sent to followers any more.
    pub fn mark_log_damaged(&self) {
        self.damaged_log.store(true, Relaxed);
    }

    /// The newest records.
    pub fn facts(&self) -> &MemoryJournal {
        &self.facts
    }

    /// The log with older ones.
    pub fn durable(&self) -> Option<&DurableJournal> {
        self.durable.as_deref()
    }

    /// What there is beside the state machine.
    pub fn aux(&self) -> &Arc<AuxState> {
        &self.aux
    }

    /// Whether a follower that has this record of this epoch needs nothing but the records after it.
    pub fn can_resume_from(&self, (epoch, number): (u64, u64)) -> bool {
        let next = self.facts.next();
        let is_kept = |wanted: u64| {
            let in_log = !self.damaged_log.load(Relaxed)
                && self.durable.as_ref().is_some_and(|it| it.log().oldest() <= wanted);
            in_log || self.facts.read(wanted, |_, _| {}).is_some()
        };
        self.aux.epochs.lock().contains(next - 1, (epoch, number)) && is_kept(number + 1)
    }

    /// Tells of records that somebody waits for.
    pub fn commit_target(&self) -> watch::Receiver<u64> {
        self.commit_target.subscribe()
    }

    /// As [`InSyncTracker::join`]. Returns whether this master leads.
    pub fn join(&self, member: &HaMember, acknowledged: u64) -> bool {
        let joined = self.with(|quorum| {
            // Seen with the quorum locked: whoever commits a later record waits for this follower.
            let last = self.facts.next() - 1;
            quorum.join(member, acknowledged, last, now());
        });
        self.in_sync_changed.notify_one();
        joined.is_some()
    }

    /// As [`InSyncTracker::acknowledge`].
    pub fn acknowledge(&self, member: &HaMember, number: u64) -> bool {
        let counts = self.with(|quorum| quorum.acknowledge(member, number, now())) == Some(true);
        self.progress.notify_all();
        counts
    }

    /// As [`InSyncTracker::remove_silent`].
    pub fn remove_silent(&self, patience: Duration) -> Vec<HaMember> {
        self.with(|quorum| quorum.remove_silent(now(), patience)).unwrap_or_default()
    }

    /// As [`InSyncTracker::pending_in_sync`].
    pub fn pending_in_sync(&self) -> Option<InSyncSet> {
        self.with(InSyncTracker::pending_in_sync).flatten()
    }

    /// As [`InSyncTracker::confirm_in_sync`].
    pub fn confirm_in_sync(&self, members: InSyncSet) {
        self.with(|quorum| quorum.confirm_in_sync(members));
        self.progress.notify_all();
    }

    /// Returns when [`Self::pending_in_sync`] may have become something else.
    pub async fn in_sync_changed(&self) {
        self.in_sync_changed.notified().await;
    }

    fn raise_commit_target(&self, number: u64) {
        self.commit_target.send_if_modified(|wanted| number > std::mem::replace(wanted, number.max(*wanted)));
    }

    fn with<T>(&self, act: impl FnOnce(&mut InSyncTracker) -> T) -> Option<T> {
        self.in_sync.lock().as_mut().map(act)
    }

    fn check(&self) -> io::Result<()> {
        if self.fence.is_open(now()) {
            Ok(())
        } else {
            Err(io::Error::other("this master does not lead any more"))
        }
    }
}

impl Journal for ReplicatedJournal {
    fn append(&self, fact: &[u8]) -> u64 {
        // Both give it the same number.
        self.facts.append_and(fact, || {
            if let Some(durable) = self.durable.as_ref().filter(|_| !self.sealed.load(Relaxed)) {
                durable.append(fact);
            }
        })
    }

    fn commit(&self, number: u64) -> io::Result<()> {
        let lost = || Err(io::Error::other("this master does not lead any more"));
        if let Some(durable) = &self.durable {
            // Followers write it meanwhile.
            if self.with(|quorum| !quorum.is_acknowledged(number)) == Some(true) {
                self.raise_commit_target(number);
            }
            durable.commit(number)?;
        }
        let mut quorum = self.in_sync.lock();
        loop {
            match &*quorum {
                None => return lost(),
                Some(quorum) if quorum.is_acknowledged(number) => return self.check(),
                Some(_) => {}
            }
            self.check()?;
            self.raise_commit_target(number);
            self.progress.wait_for(&mut quorum, LEADERSHIP_CHECK_INTERVAL);
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
    fn commits_wait_for_followers_and_end_with_the_tenure() {
        let fence = Arc::new(LeaseFence::default());
        let journal = ReplicatedJournal::new(1, 1 << 20, Arc::clone(&fence), Arc::default(), None);
        let number = journal.append(b"fact");
        assert!(journal.commit(number).is_err());
        let [me, other] = ["a", "b"].map(HaMember::new);
        journal.lead(&me);
        assert!(journal.commit(number).is_err(), "the fence is down");
        fence.extend(now() + Duration::from_secs(600));
        assert!(journal.commit(number).is_ok() && journal.may_reply().is_ok());
        journal.join(&other, number);
        let (second, third) = (journal.append(b"second"), journal.append(b"third"));
        let mut wanted = journal.commit_target();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| journal.commit(second));
            while *wanted.borrow_and_update() < second {
                std::thread::yield_now();
            }
            assert!(!waits.is_finished());
            journal.acknowledge(&other, second);
            assert!(waits.join().unwrap().is_ok());
            let waits = scope.spawn(|| journal.commit(third));
            journal.step_down();
            assert!(waits.join().unwrap().is_err());
        });
        fence.revoke();
        assert!(journal.may_reply().is_err());
    }
    #[test]
    fn both_logs_have_the_same_numbers_until_the_end() {
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
        assert!(journal.can_resume_from((epoch, 41)), "what memory has forgotten is in the log");
        assert!(!journal.can_resume_from((epoch, last + 1)) && !journal.can_resume_from((epoch ^ 1, last)));
        assert_eq!(journal.seal(), last);
        journal.append(b"late");
        assert_eq!(durable.log().next(), last + 1);
    }
}
