//! The keeper on a thread of its own: it waits for the disk.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use moongate_oplog::OplogError;
use moongate_runtime::Supervisor;

use crate::durable::{DurableJournal, PersistenceSchedule, StatePersister};
use crate::server::MasterServer;
use crate::state::AuxState;

/// A keeper that runs.
#[derive(Debug)]
pub(super) struct RunningPersister {
    stop: Sender<()>,
    thread: JoinHandle<Result<(), OplogError>>,
}

impl RunningPersister {
    pub(super) fn start(
        durable: Arc<DurableJournal>,
        server: Arc<MasterServer>,
        beside: Arc<AuxState>,
        pace: PersistenceSchedule,
        supervisor: &Supervisor,
    ) -> io::Result<Self> {
        let (stop, stopped) = std::sync::mpsc::channel();
        let run = supervisor.wrap_essential_thread("data", move || {
            StatePersister::new(&durable, &server.master, &beside, pace).run(&stopped);
            durable.log().close()
        });
        let thread = std::thread::Builder::new().name("data".to_owned()).spawn(run)?;
        Ok(Self { stop, thread })
    }

    /// Ends it, and returns how that went; nothing if it has panicked.
    pub(super) fn close(self) -> Option<Result<(), OplogError>> {
        drop(self.stop);
        self.thread.join().ok()
    }
}
