//! A server whose state is kept in a folder, and the thread that looks after it.

#[cfg(feature = "simulation")]
mod task;
#[cfg(not(feature = "simulation"))]
mod thread;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use moongate_oplog::{OplogError, OplogOptions};
use moongate_runtime::Supervisor;

use crate::clock::MonotonicUnixClock;
use crate::durable::{DurableJournal, PersistenceSchedule};
use crate::flags::DataDirOptions;
use crate::ha::MEMBER;
use crate::journal::Journal;
use crate::server::{MasterServer, MasterServerOptions};
use crate::state::{AuxState, MasterState};
#[cfg(feature = "simulation")]
use task::RunningPersister;
#[cfg(not(feature = "simulation"))]
use thread::RunningPersister;

/// Why a state cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum PersistenceError {
    /// The folder cannot be used.
    #[error("the state cannot be kept; --data_dir wants a folder that can be written to")]
    Data(#[from] OplogError),
    /// The folder has another form.
    #[error("{0} is that of one of several masters: start it with --enable_ha, or give it another folder")]
    Member(PathBuf),
    /// There is no thread for it.
    #[error("there is no thread for the log of changes")]
    Thread(#[source] std::io::Error),
}

/// What flushes a server's log and writes its snapshots.
#[derive(Debug)]
pub(crate) struct StatePersistence {
    persister: RunningPersister,
}

impl StatePersistence {
    /// A server with the state in a folder. `observe` may put something between it and its log.
    pub(crate) fn open(
        data: &DataDirOptions,
        server: MasterServerOptions,
        supervisor: &Supervisor,
        observe: impl FnOnce(Arc<dyn Journal>, &Arc<AuxState>) -> Arc<dyn Journal>,
    ) -> Result<(Arc<MasterServer>, Self), PersistenceError> {
        let (clock, begun) = (MonotonicUnixClock::start(), Instant::now());
        if data.folder.join(MEMBER).exists() {
            return Err(PersistenceError::Member(data.folder.clone()));
        }
        let options = OplogOptions { flush_always: data.flush_always, ..OplogOptions::default() };
        let (durable, state, restored) =
            DurableJournal::open(&data.folder, options, &server.core, clock.now_ms())?;
        tracing::info!(folder = %data.folder.display(), took = ?begun.elapsed(), "the state: {restored}");
        let lacks_log = restored.lacks_log();
        let durable = Arc::new(durable);
        let MasterState { master, aux: beside, .. } = state;
        let server =
            Arc::new(MasterServer::with_state(server, *master, clock, observe(durable.clone(), &beside)));
        if lacks_log {
            server.open_rebuild();
        }
        let pace =
            PersistenceSchedule { snapshot_every: data.snapshot_every, ..PersistenceSchedule::default() };
        let keeper = RunningPersister::start(durable, Arc::clone(&server), beside, pace, supervisor);
        Ok((server, Self { persister: keeper.map_err(PersistenceError::Thread)? }))
    }

    /// Saves what is left to be saved.
    pub(crate) fn close(self) {
        match self.persister.close() {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::error!(%error, "the last changes may not be saved"),
            None => {
                tracing::error!("the last changes may not be saved: the thread that saves them has failed");
            }
        }
    }
}
