//! The state that a master has while another leads.

use std::io;
use std::sync::Arc;

use moongate_kvcore::{Effects, Fact, Master, Settings, SnapshotCursor, decode};

use super::follower::Copy;
use crate::server::Server;

/// Places of the table that are looked at under one lock.
const PLACES_AT_ONCE: u32 = 1024;

/// A state, and the last record that it has.
#[derive(Debug)]
pub struct State {
    /// The state.
    pub master: Box<Master>,
    /// The record's number.
    pub last: u64,
}

impl State {
    fn empty(settings: &Settings) -> Self {
        Self { master: Box::new(Master::new(settings.clone())), last: 0 }
    }

    /// The state of a server that serves nobody any more.
    pub fn of(server: Arc<Server>, last: u64) -> Self {
        let master = Arc::try_unwrap(server).map(Server::into_master);
        let master = master.unwrap_or_else(|still_used| {
            let copy = Applied(Master::new(still_used.master.settings().clone()));
            let (mut cursor, mut copy) = (Some(SnapshotCursor::default()), copy);
            while let Some(from) = cursor {
                cursor = still_used.master.snapshot(from, PLACES_AT_ONCE, &mut copy);
            }
            copy.0
        });
        Self { master: Box::new(master), last }
    }
}

/// Makes facts true at once. What does not fit is left out.
struct Applied(Master);

impl Effects for Applied {
    fn fact(&mut self, fact: Fact<'_>) {
        let _ = self.0.apply(&fact);
    }
}

/// A follower's copy of the leader's state.
#[derive(Debug)]
pub struct Replica {
    settings: Settings,
    state: State,
    /// The state that shall take its place, when it is whole.
    loading: Option<State>,
    /// The term of the leader whose records `state` has.
    term: Option<i64>,
    /// Records that did not fit: they are about what is gone by now.
    left_out: u64,
}

impl Replica {
    /// An empty state.
    pub fn new(settings: Settings) -> Self {
        let state = State::empty(&settings);
        Self { settings, state, loading: None, term: None, left_out: 0 }
    }

    /// The term and the last record of what it has, if that can be gone on with.
    pub fn has(&self) -> Option<(i64, u64)> {
        self.term.map(|term| (term, self.state.last))
    }

    /// Takes the state to lead from it; an empty one stays.
    pub fn take(&mut self) -> State {
        (self.loading, self.term) = (None, None);
        std::mem::replace(&mut self.state, State::empty(&self.settings))
    }

    /// Puts back what was led.
    pub fn put(&mut self, state: State) {
        (self.state, self.term) = (state, None);
    }

    /// Forgets a state that was not received to its end.
    pub fn forget_unfinished(&mut self) {
        self.loading = None;
    }

    fn apply(&mut self, record: &[u8]) {
        let master = &self.loading.as_ref().unwrap_or(&self.state).master;
        let applied = decode(record).is_ok_and(|(fact, rest): (Fact<'_>, _)| {
            // A record is one fact.
            rest.is_empty() && master.apply(&fact).is_ok()
        });
        self.left_out += u64::from(!applied);
    }
}

impl Copy for Replica {
    fn begin(&mut self, number: u64) {
        self.left_out = 0;
        self.loading = Some(State { last: number, ..State::empty(&self.settings) });
    }

    fn part(&mut self, record: &[u8]) {
        self.apply(record);
    }

    fn whole(&mut self, term: i64) {
        if let Some(state) = self.loading.take() {
            let (keys, last) = (state.master.key_count(), state.last);
            tracing::info!(keys, last, left_out = self.left_out, "has the leader's state");
            (self.state, self.term) = (state, Some(term));
        }
    }

    fn record(&mut self, number: u64, record: &[u8]) {
        self.apply(record);
        self.loading.as_mut().unwrap_or(&mut self.state).last = number;
    }

    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }
}
