//! Clients of the store, each with a runtime that the calling thread drives.
//!
//! A client belongs to one runtime, and several clients on single-threaded runtimes are the fastest setup. So every concurrent call
//! has a client of its own; calls one after another reuse the last one, whose connections are open.

use std::io;
use std::time::{Duration, Instant};

use moongate_runtime::Supervisor;
use moongate_store_client::{DirectoryError, KvClient, KvClientOptions};
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Runtime;

/// Maximum number of clients. Further concurrent calls wait.
const MAX_SESSIONS: usize = 64;
/// A session that was idle for this long first handles what happened to its connections meanwhile, such as that the master closed them.
const STALE_AFTER: Duration = Duration::from_millis(500);
/// How often it then lets its connections run.
const STALE_TURNS: usize = 8;

/// A call cannot get a client.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("cannot create the runtime of a client: {0}")]
    Runtime(#[from] io::Error),
    #[error(transparent)]
    Client(#[from] DirectoryError),
}

/// All clients of a store.
pub struct SessionPool {
    master: String,
    options: KvClientOptions,
    state: Mutex<PoolState>,
    returned: Condvar,
}

#[derive(Default)]
struct PoolState {
    idle: Vec<ClientSession>,
    /// Sessions that exist: idle and in use.
    sessions: usize,
}

struct ClientSession {
    client: KvClient,
    used: Instant,
    supervisor: Supervisor,
    runtime: Runtime,
}

impl ClientSession {
    fn open(master: &str, options: &KvClientOptions) -> Result<Self, SessionError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let supervisor = Supervisor::new();
        let entered = runtime.enter();
        let client = KvClient::new(master, options.clone(), &supervisor)?;
        drop(entered);
        Ok(Self { client, used: Instant::now(), supervisor, runtime })
    }

    fn run<T>(&self, call: impl AsyncFnOnce(&KvClient) -> T) -> T {
        self.runtime.block_on(async {
            if self.used.elapsed() > STALE_AFTER {
                for _ in 0..STALE_TURNS {
                    tokio::task::yield_now().await;
                }
            }
            call(&self.client).await
        })
    }
}

impl Drop for ClientSession {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}

/// Ends the count of a session that was not returned: it could not be opened, or its call panicked and it is dropped.
struct SessionPermit<'a> {
    pool: &'a SessionPool,
    is_returned: bool,
}

impl Drop for SessionPermit<'_> {
    fn drop(&mut self) {
        if !self.is_returned {
            self.pool.state.lock().sessions -= 1;
        }
        self.pool.returned.notify_one();
    }
}

impl SessionPool {
    /// Clients of the store whose master is at `master`. They connect on first use.
    #[must_use]
    pub fn new(master: &str, options: KvClientOptions) -> Self {
        let (state, returned) = (Mutex::default(), Condvar::new());
        Self { master: master.to_owned(), options, state, returned }
    }

    /// Runs a call with a client that no other thread uses.
    ///
    /// # Errors
    /// [`SessionError`] when a new client is needed and cannot be created.
    pub fn run<T>(&self, call: impl AsyncFnOnce(&KvClient) -> T) -> Result<T, SessionError> {
        let mut state = self.state.lock();
        let idle = loop {
            match state.idle.pop() {
                Some(session) => break Some(session),
                None if state.sessions < MAX_SESSIONS => {
                    state.sessions += 1;
                    break None;
                }
                None => self.returned.wait(&mut state),
            }
        };
        drop(state);
        let mut permit = SessionPermit { pool: self, is_returned: false };
        let mut session = match idle {
            Some(session) => session,
            None => ClientSession::open(&self.master, &self.options)?,
        };
        let result = session.run(call);
        session.used = Instant::now();
        self.state.lock().idle.push(session);
        permit.is_returned = true;
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;

    use super::*;

    fn pool() -> SessionPool {
        SessionPool::new("127.0.0.1:1", KvClientOptions::default())
    }

    #[test]
    fn concurrent_calls_have_clients_of_their_own() {
        let (pool, both) = (pool(), Barrier::new(2));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| pool.run(async |_| _ = both.wait()).unwrap());
            }
        });
        assert_eq!(pool.state.lock().sessions, 2);
        pool.run(async |_| ()).unwrap();
        let state = pool.state.lock();
        assert_eq!((state.sessions, state.idle.len()), (2, 2));
    }

    #[test]
    fn a_panic_ends_only_its_session() {
        let pool = pool();
        let ended = catch_unwind(AssertUnwindSafe(|| pool.run(async |_| assert_eq!(1, 2))));
        assert!(ended.is_err());
        assert_eq!(pool.state.lock().sessions, 0);
        assert_eq!(pool.run(async |_| 3).unwrap(), 3);
    }
}
