//! The journal of a standby master: it accepts no records, and reports the status of the disk.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use super::standby_replica::StandbyReplica;
use crate::journal::{DataDirStatus, Journal};

pub(super) struct StandbyJournal(pub(super) Arc<Mutex<StandbyReplica>>);

impl Journal for StandbyJournal {
    fn append(&self, _: &[u8]) -> u64 {
        0
    }

    fn commit(&self, _: u64) -> io::Result<()> {
        Err(io::Error::other("this master is a standby"))
    }

    fn storage(&self) -> Option<DataDirStatus> {
        self.0.lock().disk()?.durable().storage()
    }
}
