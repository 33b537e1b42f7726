//! The keeper on a thread of its own: it waits for the disk.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use moongate_oplog::Error;
use moongate_runtime::Supervisor;

use crate::durable::{Durable, Keeper, Pace};
use crate::server::Server;
use crate::state::Beside;

/// A keeper that runs.
#[derive(Debug)]
pub(super) struct Running {
    stop: Sender<()>,
    thread: JoinHandle<Result<(), Error>>,
}

impl Running {
    pub(super) fn start(
        durable: Arc<Durable>,
        server: Arc<Server>,
        beside: Arc<Beside>,
        pace: Pace,
        supervisor: &Supervisor,
    ) -> io::Result<Self> {
        let (stop, stopped) = std::sync::mpsc::channel();
        let run = supervisor.essential_thread("data", move || {
            Keeper::new(&durable, &server.master, &beside, pace).run(&stopped);
            durable.log().close()
        });
        let thread = std::thread::Builder::new().name("data".to_owned()).spawn(run)?;
        Ok(Self { stop, thread })
    }

    /// Ends it, and returns how that went; nothing if it has panicked.
    pub(super) fn close(self) -> Option<Result<(), Error>> {
        drop(self.stop);
        self.thread.join().ok()
    }
}
