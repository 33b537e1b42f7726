//! The persister on its own thread, because it blocks on the disk.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use moongate_oplog::OplogError;
use moongate_runtime::Supervisor;

use crate::durable::{DurableJournal, PersistenceSchedule, StatePersister};
use crate::server::MasterServer;
use crate::state::AuxState;

/// Handle of the running persister.
#[derive(Debug)]
pub(super) struct RunningPersister {
    stop: Sender<()>,
    thread: JoinHandle<Result<(), OplogError>>,
}

impl RunningPersister {
    pub(super) fn start(
        durable: Arc<DurableJournal>,
        server: Arc<MasterServer>,
        aux: Arc<AuxState>,
        schedule: PersistenceSchedule,
        supervisor: &Supervisor,
    ) -> io::Result<Self> {
        let (stop, stopped) = std::sync::mpsc::channel();
        let run = supervisor.wrap_essential_thread("data", move || {
            StatePersister::new(&durable, &server.master, &aux, schedule).run(&stopped);
            durable.log().close()
        });
        let thread = std::thread::Builder::new().name("data".to_owned()).spawn(run)?;
        Ok(Self { stop, thread })
    }

    /// Stops it and returns the result of closing the log; `None` if it has panicked.
    pub(super) fn close(self) -> Option<Result<(), OplogError>> {
        drop(self.stop);
        self.thread.join().ok()
    }
}
