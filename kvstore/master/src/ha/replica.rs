//! The state that a master has while another leads.

use std::io;
use std::sync::Arc;

use moongate_kvcore::Settings;

use super::disk::{Copying, Disk};
use super::follower::Copy;
use crate::durable::Durable;
use crate::journal::Journal as _;
use crate::state::State;

/// A follower's copy of the leader's state.
#[derive(Debug)]
pub struct Replica {
    settings: Settings,
    state: State,
    /// Whether `state` has been changed by records alone. One that was led from takes no records any more.
    follows: bool,
    /// The state that shall take its place, when it is whole.
    loading: Option<Loading>,
    /// Where the state is kept, if it is.
    disk: Option<Disk>,
    /// Records that did not fit: they are about what is gone by now.
    left_out: u64,
}

#[derive(Debug)]
struct Loading {
    state: State,
    files: Option<Copying>,
}

impl Replica {
    /// An empty state, in memory only.
    pub fn new(settings: Settings) -> Self {
        let state = State::empty(&settings);
        Self { settings, state, follows: true, loading: None, disk: None, left_out: 0 }
    }

    /// The state that was on a disk, and goes on there.
    pub fn on_disk(settings: Settings, disk: Disk, state: State) -> Self {
        Self { state, disk: Some(disk), ..Self::new(settings) }
    }

    /// The epoch and the number of the last record that it has, if records can follow on it.
    pub fn has(&self) -> Option<(u64, u64)> {
        self.state.position().filter(|_| self.follows)
    }

    /// Takes the state to lead from it, and its log; an empty one stays.
    pub fn take(&mut self) -> (State, Option<Arc<Durable>>) {
        (self.loading, self.follows) = (None, false);
        if let Some(disk) = &mut self.disk {
            disk.rest();
        }
        let state = std::mem::replace(&mut self.state, State::empty(&self.settings));
        (state, self.disk.as_ref().map(|disk| Arc::clone(disk.durable())))
    }

    /// Puts back what was led.
    pub fn put(&mut self, state: State) {
        self.state = state;
    }

    /// Where the state is kept.
    pub fn disk(&self) -> Option<&Disk> {
        self.disk.as_ref()
    }

    /// Forgets a state that was not received to its end.
    pub fn forget_unfinished(&mut self) {
        self.loading = None;
    }

    /// Nothing follows any more. What is kept on a disk is whole after this.
    pub fn close(&mut self) {
        self.loading = None;
        if let Some(Err(error)) = self.disk.as_mut().map(Disk::close) {
            tracing::error!(%error, "the last changes may not be saved");
        }
    }

    fn loading(&mut self) -> io::Result<&mut Loading> {
        self.loading.as_mut().ok_or_else(|| io::Error::other("no state has begun"))
    }
}

impl Copy for Replica {
    fn begin(&mut self, number: u64) -> io::Result<()> {
        self.left_out = 0;
        // Files that were begun before have to be gone first.
        self.loading = None;
        let files = self.disk.as_ref().map(|disk| disk.begin_copy(number)).transpose()?;
        let state = State { last: number, ..State::empty(&self.settings) };
        self.loading = Some(Loading { state, files });
        Ok(())
    }

    fn part(&mut self, record: &[u8]) -> io::Result<()> {
        let loading = self.loading()?;
        let fits = loading.state.apply(record);
        if let Some(files) = &mut loading.files {
            files.part(record)?;
        }
        self.left_out += u64::from(!fits);
        Ok(())
    }

    fn whole(&mut self) -> io::Result<()> {
        let Some(Loading { state, files }) = self.loading.take() else { return Ok(()) };
        if let (Some(disk), Some(files)) = (&mut self.disk, files) {
            disk.finish_copy(files)?;
        }
        let (keys, last) = (state.master.key_count(), state.last);
        tracing::info!(keys, last, left_out = self.left_out, "has the leader's state");
        (self.state, self.follows) = (state, true);
        Ok(())
    }

    fn record(&mut self, _: u64, record: &[u8]) {
        let fits = if let Some(loading) = &mut self.loading {
            if let Some(files) = &loading.files {
                files.record(record);
            }
            loading.state.next(record)
        } else {
            if let Some(disk) = &self.disk {
                disk.durable().append(record);
            }
            self.state.next(record)
        };
        self.left_out += u64::from(!fits);
    }

    fn commit(&mut self) -> io::Result<()> {
        let Some(disk) = &mut self.disk else { return Ok(()) };
        disk.durable().commit(self.state.last)?;
        disk.tend(&self.state);
        Ok(())
    }
}
