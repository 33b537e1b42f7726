//! The persister as a task: a simulation has one thread.

use std::io;
use std::sync::Arc;

use moongate_oplog::OplogError;
use moongate_runtime::Supervisor;

use crate::durable::{DurableJournal, PersistenceSchedule, StatePersister};
use crate::server::MasterServer;
use crate::state::AuxState;

/// Handle of the running persister.
#[derive(Debug)]
pub(super) struct RunningPersister {
    durable: Arc<DurableJournal>,
}

impl RunningPersister {
    #[expect(clippy::unnecessary_wraps, reason = "the thread in its place can fail to start")]
    pub(super) fn start(
        durable: Arc<DurableJournal>,
        server: Arc<MasterServer>,
        aux: Arc<AuxState>,
        schedule: PersistenceSchedule,
        supervisor: &Supervisor,
    ) -> io::Result<Self> {
        let (journal, stop) = (Arc::clone(&durable), supervisor.token());
        supervisor.spawn_essential("data", async move {
            let (_running, stopped) = std::sync::mpsc::channel();
            let mut progress = StatePersister::new(&journal, &server.master, &aux, schedule).progress();
            while stop.run_until_cancelled(tokio::time::sleep(schedule.flush_every)).await.is_some() {
                StatePersister::new(&journal, &server.master, &aux, schedule)
                    .run_once(&mut progress, &stopped);
            }
        });
        Ok(Self { durable })
    }

    /// Closes the log and returns the result.
    pub(super) fn close(self) -> Option<Result<(), OplogError>> {
        Some(self.durable.log().close())
    }
}
