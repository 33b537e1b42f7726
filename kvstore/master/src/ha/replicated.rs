//! A journal whose commits wait for those who follow.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

use super::fence::{Fence, now};
use super::member::{InSync, Member};
use super::quorum::Quorum;
use crate::durable::Durable;
use crate::journal::{Journal, MemoryJournal, StorageStatus};
use crate::record;
use crate::state::Beside;

/// How often a commit that waits looks whether this master still leads.
const LOOK: Duration = Duration::from_millis(50);

/// Records of a leader, kept in memory for those who follow it, and on its own disk if it has one.
#[derive(Debug)]
pub struct Replicated {
    facts: MemoryJournal,
    durable: Option<Arc<Durable>>,
    /// Nothing goes to `durable` any more.
    sealed: AtomicBool,
    /// Records of `durable` could not be read.
    damaged_log: AtomicBool,
    beside: Arc<Beside>,
    fence: Arc<Fence>,
    /// Nothing while this master does not lead.
    quorum: Mutex<Option<Quorum>>,
    progress: Condvar,
    /// The last record that somebody waits for.
    wanted: watch::Sender<u64>,
    /// Told when the store has to list others than it does.
    relist: tokio::sync::Notify,
}

impl Replicated {
    /// Records from number `next` on, of which about the newest `capacity` bytes are kept in memory. `durable` is the log that has
    /// those before.
    pub fn new(
        next: u64,
        capacity: usize,
        fence: Arc<Fence>,
        beside: Arc<Beside>,
        durable: Option<Arc<Durable>>,
    ) -> Self {
        Self {
            facts: MemoryJournal::starting_at(next, capacity),
            durable,
            sealed: AtomicBool::new(false),
            damaged_log: AtomicBool::new(false),
            beside,
            fence,
            quorum: Mutex::new(None),
            progress: Condvar::new(),
            wanted: watch::Sender::new(next - 1),
            relist: tokio::sync::Notify::new(),
        }
    }

    /// This master leads from now on, and alone has all. Its epoch begins.
    pub fn lead(&self, me: &Member) {
        let id = fastrand::u64(..);
        let number = self.append(&record::epoch(id));
        self.beside.epochs.lock().begin(id, number);
        *self.quorum.lock() = Some(Quorum::new(me.clone()));
    }

    /// This master leads no more: whoever waits is refused.
    pub fn step_down(&self) {
        *self.quorum.lock() = None;
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
    pub fn log_is_damaged(&self) {
        self.damaged_log.store(true, Relaxed);
    }

    /// The newest records.
    pub fn facts(&self) -> &MemoryJournal {
        &self.facts
    }

    /// The log with older ones.
    pub fn durable(&self) -> Option<&Durable> {
        self.durable.as_deref()
    }

    /// What there is beside the state machine.
    pub fn beside(&self) -> &Arc<Beside> {
        &self.beside
    }

    /// Whether a follower that has this record of this epoch needs nothing but the records after it.
    pub fn leads_on_from(&self, (epoch, number): (u64, u64)) -> bool {
        let next = self.facts.next();
        let is_kept = |wanted: u64| {
            let in_log = !self.damaged_log.load(Relaxed)
                && self.durable.as_ref().is_some_and(|it| it.log().oldest() <= wanted);
            in_log || self.facts.read(wanted, |_, _| {}).is_some()
        };
        self.beside.epochs.lock().have(next - 1, (epoch, number)) && is_kept(number + 1)
    }

    /// Tells of records that somebody waits for.
    pub fn wanted(&self) -> watch::Receiver<u64> {
        self.wanted.subscribe()
    }

    /// As [`Quorum::join`]. Returns whether this master leads.
    pub fn join(&self, member: &Member, acknowledged: u64) -> bool {
        let joined = self.with(|quorum| {
            // Seen with the quorum locked: whoever commits a later record waits for this follower.
            let last = self.facts.next() - 1;
            quorum.join(member, acknowledged, last, now());
        });
        self.relist.notify_one();
        joined.is_some()
    }

    /// As [`Quorum::acknowledge`].
    pub fn acknowledge(&self, member: &Member, number: u64) -> bool {
        let counts = self.with(|quorum| quorum.acknowledge(member, number, now())) == Some(true);
        self.progress.notify_all();
        counts
    }

    /// As [`Quorum::give_up`].
    pub fn give_up(&self, patience: Duration) -> Vec<Member> {
        self.with(|quorum| quorum.give_up(now(), patience)).unwrap_or_default()
    }

    /// As [`Quorum::to_list`].
    pub fn to_list(&self) -> Option<InSync> {
        self.with(Quorum::to_list).flatten()
    }

    /// As [`Quorum::listed`].
    pub fn listed(&self, members: InSync) {
        self.with(|quorum| quorum.listed(members));
        self.progress.notify_all();
    }

    /// Returns when [`Self::to_list`] may have become something else.
    pub async fn relisted(&self) {
        self.relist.notified().await;
    }

    fn want(&self, number: u64) {
        self.wanted.send_if_modified(|wanted| number > std::mem::replace(wanted, number.max(*wanted)));
    }

    fn with<T>(&self, act: impl FnOnce(&mut Quorum) -> T) -> Option<T> {
        self.quorum.lock().as_mut().map(act)
    }

    fn check(&self) -> io::Result<()> {
        if self.fence.stands(now()) {
            Ok(())
        } else {
            Err(io::Error::other("this master does not lead any more"))
        }
    }
}

impl Journal for Replicated {
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
            if self.with(|quorum| !quorum.has(number)) == Some(true) {
                self.want(number);
            }
            durable.commit(number)?;
        }
        let mut quorum = self.quorum.lock();
        loop {
            match &*quorum {
                None => return lost(),
                Some(quorum) if quorum.has(number) => return self.check(),
                Some(_) => {}
            }
            self.check()?;
            self.want(number);
            self.progress.wait_for(&mut quorum, LOOK);
        }
    }

    fn may_answer(&self) -> io::Result<()> {
        self.check()?;
        self.durable.as_ref().map_or(Ok(()), |durable| durable.may_answer())
    }

    fn may_write(&self) -> bool {
        self.durable.as_ref().is_none_or(|durable| durable.may_write())
    }

    fn storage(&self) -> Option<StorageStatus> {
        self.durable.as_ref()?.storage()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_wait_for_followers_and_end_with_the_tenure() {
        let fence = Arc::new(Fence::default());
        let journal = Replicated::new(1, 1 << 20, Arc::clone(&fence), Arc::default(), None);
        let number = journal.append(b"fact");
        assert!(journal.commit(number).is_err());
        let [me, other] = ["a", "b"].map(Member::new);
        journal.lead(&me);
        assert!(journal.commit(number).is_err(), "the fence is down");
        fence.set(now() + Duration::from_secs(600));
        assert!(journal.commit(number).is_ok() && journal.may_answer().is_ok());
        journal.join(&other, number);
        let (second, third) = (journal.append(b"second"), journal.append(b"third"));
        let mut wanted = journal.wanted();
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
        fence.lower();
        assert!(journal.may_answer().is_err());
    }
    #[test]
    fn both_logs_have_the_same_numbers_until_the_end() {
        let folder = tempfile::TempDir::new().unwrap();
        let durable =
            Arc::new(Durable::begin(folder.path(), moongate_oplog::Options::default(), 41).unwrap());
        let fence = Arc::new(Fence::default());
        fence.set(now() + Duration::from_secs(600));
        let journal = Replicated::new(41, 0, fence, Arc::default(), Some(Arc::clone(&durable)));
        journal.lead(&Member::new("a"));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..500).for_each(|number: u32| _ = journal.append(&number.to_le_bytes())));
            }
        });
        let last = journal.facts().next() - 1;
        journal.commit(last).unwrap();
        assert_eq!((last, durable.log().written()), (41 + 2000, last));
        let epoch = journal.beside().epochs.lock().current().unwrap();
        assert!(journal.leads_on_from((epoch, 41)), "what memory has forgotten is in the log");
        assert!(!journal.leads_on_from((epoch, last + 1)) && !journal.leads_on_from((epoch ^ 1, last)));
        assert_eq!(journal.seal(), last);
        journal.append(b"late");
        assert_eq!(durable.log().next(), last + 1);
    }
}
