//! The keeper as a task: a simulation has one thread.

use std::io;
use std::sync::Arc;

use moongate_oplog::OplogError;
use moongate_runtime::Supervisor;

use crate::durable::{DurableJournal, PersistenceSchedule, StatePersister};
use crate::server::MasterServer;
use crate::state::AuxState;

/// A keeper that runs.
#[derive(Debug)]
pub(super) struct RunningPersister {
    durable: Arc<DurableJournal>,
}

impl RunningPersister {
    #[expect(clippy::unnecessary_wraps, reason = "the thread in its place can fail to start")]
    pub(super) fn start(
        durable: Arc<DurableJournal>,
        server: Arc<MasterServer>,
        beside: Arc<AuxState>,
        pace: PersistenceSchedule,
        supervisor: &Supervisor,
    ) -> io::Result<Self> {
        let (kept, stop) = (Arc::clone(&durable), supervisor.token());
        supervisor.spawn_essential("data", async move {
            let (_running, stopped) = std::sync::mpsc::channel();
            let mut progress = StatePersister::new(&kept, &server.master, &beside, pace).progress();
            while stop.run_until_cancelled(tokio::time::sleep(pace.flush_every)).await.is_some() {
                StatePersister::new(&kept, &server.master, &beside, pace).run_once(&mut progress, &stopped);
            }
        });
        Ok(Self { durable })
    }

    /// Ends it, and returns how that went.
    pub(super) fn close(self) -> Option<Result<(), OplogError>> {
        Some(self.durable.log().close())
    }
}
