//! Persistent state of a standalone server, and its background persister.

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
use crate::durable::{
    DataDirOptions, DurableJournal, MEMBER_FILE, RestoredJournal, ShardMarkerError, mark_folder,
};
use crate::journal::Journal;
use crate::server::{MasterServer, MasterServerOptions};
use crate::state::{AuxState, MasterState};
#[cfg(feature = "simulation")]
use task::RunningPersister;
#[cfg(not(feature = "simulation"))]
use thread::RunningPersister;

/// Why the state cannot be persisted.
#[derive(Debug, thiserror::Error)]
pub enum PersistenceError {
    /// The folder cannot be used.
    #[error("cannot open the state; --data_dir must be a writable directory")]
    Data(#[from] OplogError),
    /// The folder contains the state of an HA member.
    #[error("{0} contains the state of an HA master; start with --enable_ha, or set another --data_dir")]
    Member(PathBuf),
    #[error(transparent)]
    Shard(#[from] ShardMarkerError),
    /// The persister's thread could not be started.
    #[error("cannot start the persister thread")]
    Thread(#[source] std::io::Error),
}

/// The running persister of a server's log.
#[derive(Debug)]
pub(crate) struct StatePersistence {
    persister: RunningPersister,
}

impl StatePersistence {
    /// A server with the state of a folder. `observe` may wrap its journal.
    pub(crate) fn open(
        data: &DataDirOptions,
        server: MasterServerOptions,
        supervisor: &Supervisor,
        observe: impl FnOnce(Arc<dyn Journal>, &Arc<AuxState>) -> Arc<dyn Journal>,
    ) -> Result<(Arc<MasterServer>, Self), PersistenceError> {
        let (clock, started) = (MonotonicUnixClock::start(), Instant::now());
        if data.folder.join(MEMBER_FILE).exists() {
            return Err(PersistenceError::Member(data.folder.clone()));
        }
        mark_folder(&data.folder, server.shard)?;
        let options = OplogOptions { flush_always: data.flush_always, ..OplogOptions::default() };
        let RestoredJournal { journal: durable, state, report: restored } =
            DurableJournal::open(&data.folder, options, &server.core, clock.now_ms())?;
        tracing::info!(folder = %data.folder.display(), elapsed = ?started.elapsed(), "state restored: {restored}");
        let lacks_log = restored.lacks_log();
        let durable = Arc::new(durable);
        let MasterState { master, aux, .. } = state;
        let server =
            Arc::new(MasterServer::with_state(server, *master, clock, observe(durable.clone(), &aux)));
        if lacks_log {
            server.open_rebuild();
        }
        let persister =
            RunningPersister::start(durable, Arc::clone(&server), aux, data.schedule(), supervisor);
        Ok((server, Self { persister: persister.map_err(PersistenceError::Thread)? }))
    }

    /// Stops the persister and closes the log.
    pub(crate) fn close(self) {
        match self.persister.close() {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::error!(%error, "cannot close the log; the last changes may be lost"),
            None => {
                tracing::error!("the persister thread panicked; the last changes may be lost");
            }
        }
    }
}
