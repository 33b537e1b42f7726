//! The keeper as a task: a simulation has one thread.

use std::io;
use std::sync::Arc;

use moongate_oplog::Error;
use moongate_runtime::Supervisor;

use crate::durable::{Durable, Keeper, Pace};
use crate::server::Server;
use crate::state::Beside;

/// A keeper that runs.
#[derive(Debug)]
pub(super) struct Running {
    durable: Arc<Durable>,
}

impl Running {
    #[expect(clippy::unnecessary_wraps, reason = "the thread in its place can fail to start")]
    pub(super) fn start(
        durable: Arc<Durable>,
        server: Arc<Server>,
        beside: Arc<Beside>,
        pace: Pace,
        supervisor: &Supervisor,
    ) -> io::Result<Self> {
        let (kept, stop) = (Arc::clone(&durable), supervisor.token());
        supervisor.spawn_essential("data", async move {
            let (_running, stopped) = std::sync::mpsc::channel();
            let mut progress = Keeper::new(&kept, &server.master, &beside, pace).progress();
            while stop.run_until_cancelled(tokio::time::sleep(pace.flush_every)).await.is_some() {
                Keeper::new(&kept, &server.master, &beside, pace).turn(&mut progress, &stopped);
            }
        });
        Ok(Self { durable })
    }

    /// Ends it, and returns how that went.
    pub(super) fn close(self) -> Option<Result<(), Error>> {
        Some(self.durable.log().close())
    }
}
