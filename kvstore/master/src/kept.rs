//! A server whose state is kept in a folder, and the thread that looks after it.

#[cfg(feature = "simulation")]
mod task;
#[cfg(not(feature = "simulation"))]
mod thread;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use moongate_oplog::{Error, Options};
use moongate_runtime::Supervisor;

use crate::clock::Clock;
use crate::durable::{Durable, Pace};
use crate::flags::DataOptions;
use crate::ha::MEMBER;
use crate::journal::Journal;
use crate::server::{Server, ServerOptions};
use crate::state::{Beside, State};
#[cfg(feature = "simulation")]
use task::Running;
#[cfg(not(feature = "simulation"))]
use thread::Running;

/// Why a state cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// The folder cannot be used.
    #[error("the state cannot be kept; --data_dir wants a folder that can be written to")]
    Data(#[from] Error),
    /// The folder has another form.
    #[error("{0} is that of one of several masters: start it with --enable_ha, or give it another folder")]
    Member(PathBuf),
    /// There is no thread for it.
    #[error("there is no thread for the log of changes")]
    Thread(#[source] std::io::Error),
}

/// What flushes a server's log and writes its snapshots.
#[derive(Debug)]
pub(crate) struct Kept {
    keeper: Running,
}

impl Kept {
    /// A server with the state in a folder. `observe` may put something between it and its log.
    pub(crate) fn open(
        data: &DataOptions,
        server: ServerOptions,
        supervisor: &Supervisor,
        observe: impl FnOnce(Arc<dyn Journal>, &Arc<Beside>) -> Arc<dyn Journal>,
    ) -> Result<(Arc<Server>, Self), KeepError> {
        let (clock, begun) = (Clock::start(), Instant::now());
        if data.folder.join(MEMBER).exists() {
            return Err(KeepError::Member(data.folder.clone()));
        }
        let options = Options { flush_always: data.flush_always, ..Options::default() };
        let (durable, state, restored) = Durable::open(&data.folder, options, &server.core, clock.now_ms())?;
        tracing::info!(folder = %data.folder.display(), took = ?begun.elapsed(), "the state: {restored}");
        let lacks_log = restored.lacks_log();
        let durable = Arc::new(durable);
        let State { master, beside, .. } = state;
        let server = Arc::new(Server::with_state(server, *master, clock, observe(durable.clone(), &beside)));
        if lacks_log {
            server.open_rebuild();
        }
        let pace = Pace { snapshot_every: data.snapshot_every, ..Pace::default() };
        let keeper = Running::start(durable, Arc::clone(&server), beside, pace, supervisor);
        Ok((server, Self { keeper: keeper.map_err(KeepError::Thread)? }))
    }

    /// Saves what is left to be saved.
    pub(crate) fn close(self) {
        match self.keeper.close() {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::error!(%error, "the last changes may not be saved"),
            None => {
                tracing::error!("the last changes may not be saved: the thread that saves them has failed");
            }
        }
    }
}
