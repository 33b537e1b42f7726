//! The journal of a standby master. It accepts no record, and reports the state of the disk.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use super::replica::Replica;
use crate::journal::{Journal, StorageStatus};

pub(super) struct StandbyJournal(pub(super) Arc<Mutex<Replica>>);

impl Journal for StandbyJournal {
    fn append(&self, _: &[u8]) -> u64 {
        0
    }

    fn commit(&self, _: u64) -> io::Result<()> {
        Err(io::Error::other("this master is a standby"))
    }

    fn storage(&self) -> Option<StorageStatus> {
        self.0.lock().disk()?.durable().storage()
    }
}
