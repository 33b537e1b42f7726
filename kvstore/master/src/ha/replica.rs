//! The state that a master has while another leads.

use std::io;
use std::sync::Arc;

use moongate_kvcore::{Fact, Master, Settings, decode};

use super::follower::Copy;
use super::replicated::Replicated;
use crate::server::Server;

/// A state that can be led from.
#[derive(Debug)]
pub enum State {
    /// That of a follower, up to a record.
    Followed(Box<Master>, u64),
    /// That of this master's own time as a leader.
    Led(Arc<Server>, Arc<Replicated>),
}

/// A follower's copy of the leader's state.
#[derive(Debug)]
pub struct Replica {
    settings: Settings,
    state: State,
    /// The state that shall take its place, when it is whole.
    loading: Option<(Box<Master>, u64)>,
    /// The term of the leader whose records `state` has.
    term: Option<i64>,
    /// Records that did not fit: they are about what is gone by now.
    left_out: u64,
}

impl Replica {
    /// An empty state.
    pub fn new(settings: Settings) -> Self {
        let state = State::Followed(Box::new(Master::new(settings.clone())), 0);
        Self { settings, state, loading: None, term: None, left_out: 0 }
    }

    /// The term and the last record of what it has, if that can be gone on with.
    pub fn has(&self) -> Option<(i64, u64)> {
        match (&self.state, self.term) {
            (State::Followed(_, last), Some(term)) => Some((term, *last)),
            _ => None,
        }
    }

    /// Takes the state to lead from it; an empty one stays.
    pub fn take(&mut self) -> State {
        (self.loading, self.term) = (None, None);
        let empty = State::Followed(Box::new(Master::new(self.settings.clone())), 0);
        std::mem::replace(&mut self.state, empty)
    }

    /// Puts back what was led.
    pub fn put(&mut self, (server, journal): (Arc<Server>, Arc<Replicated>)) {
        (self.state, self.term) = (State::Led(server, journal), None);
    }

    /// Forgets a state that was not received to its end.
    pub fn forget_unfinished(&mut self) {
        self.loading = None;
    }

    fn apply(&mut self, record: &[u8]) {
        let master = match (&self.loading, &self.state) {
            (Some((loading, _)), _) => loading,
            (None, State::Followed(master, _)) => master,
            (None, State::Led(..)) => return,
        };
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
        self.loading = Some((Box::new(Master::new(self.settings.clone())), number));
    }

    fn part(&mut self, record: &[u8]) {
        self.apply(record);
    }

    fn whole(&mut self, term: i64) {
        if let Some((master, last)) = self.loading.take() {
            tracing::info!(
                keys = master.key_count(),
                last,
                left_out = self.left_out,
                "has the leader's state"
            );
            self.state = State::Followed(master, last);
            self.term = Some(term);
        }
    }

    fn record(&mut self, number: u64, record: &[u8]) {
        self.apply(record);
        match (&mut self.loading, &mut self.state) {
            (Some((_, last)), _) | (None, State::Followed(_, last)) => *last = number,
            (None, State::Led(..)) => {}
        }
    }

    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }
}
