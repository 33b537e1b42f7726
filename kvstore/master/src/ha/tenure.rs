//! All that runs while a master leads.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use moongate_runtime::{Supervisor, bind};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::coordinator::{Coordinator, Listing, Tenure};
use super::fence::Fence;
use super::member::Member;
use super::replicated::Replicated;
use super::session::Sessions;
use super::tls::TlsFiles;
use crate::clock::Clock;
use crate::durable::{Durable, Keeper, Pace};
use crate::faces::{Faces, FacesOptions};
use crate::rpc::{self, Rpc};
use crate::server::{Server, ServerOptions};
use crate::state::State;
use crate::{summary, ticker};

/// How often it is looked for followers that are silent.
const LOOK: Duration = Duration::from_millis(50);
/// Time for calls in progress when a tenure ends. Nobody is answered by then.
const END: Duration = Duration::from_secs(2);
/// After which time it is told that a tenure does not end.
const TOO_LONG: Duration = Duration::from_secs(10);

/// What a master leads with.
#[derive(Clone, Debug)]
pub struct TenureOptions {
    /// The server.
    pub server: ServerOptions,
    /// Where RPCs are served.
    pub rpc: SocketAddr,
    /// Where followers are served.
    pub replication: SocketAddr,
    /// What is served beside RPCs. A master that stands by serves its administration only.
    pub faces: FacesOptions,
    /// How often snapshots are written, if the state is on a disk.
    pub pace: Pace,
    /// Bytes of facts that are kept for followers.
    pub journal_bytes: usize,
    /// After which silence a follower is given up.
    pub patience: Duration,
    /// For TLS between masters.
    pub tls: Option<TlsFiles>,
    /// Whether to log the most important figures every ten seconds.
    pub report: bool,
}

/// A state to lead from, the journal of its changes, and what is served beside RPCs.
pub(super) struct Led {
    pub(super) server: Arc<Server>,
    pub(super) journal: Arc<Replicated>,
    pub(super) faces: Faces,
}

impl TenureOptions {
    /// Makes a state ready to be led from.
    pub(super) fn prepare(
        &self,
        State { master, beside, last }: State,
        durable: Option<Arc<Durable>>,
        fence: &Arc<Fence>,
    ) -> Led {
        let mut faces = Faces::new(self.faces.clone());
        let (next, fence) = (last.saturating_add(1), Arc::clone(fence));
        let journal = Arc::new(Replicated::new(next, self.journal_bytes, fence, beside, durable));
        let observed = faces.observe(journal.clone(), journal.beside());
        let server = Server::with_state(self.server.clone(), *master, Clock::start(), observed);
        server.master.finish_replay(server.clock.now_ms());
        if last == 0 {
            server.open_rebuild();
        }
        Led { server: Arc::new(server), journal, faces }
    }
}

/// A tenure that has begun.
pub(super) struct Leading {
    pub(super) server: Arc<Server>,
    pub(super) rpc: Rpc,
    pub(super) deposed: CancellationToken,
    journal: Arc<Replicated>,
    supervisor: Supervisor,
    keeper: Option<Keeping>,
}

/// The thread that looks after the files of a leader's state.
struct Keeping {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Keeping {
    /// Nothing if the state is in memory only, or if there is no thread: then the log only grows.
    fn start(
        server: &Arc<Server>,
        journal: &Arc<Replicated>,
        pace: Pace,
        supervisor: &Supervisor,
    ) -> Option<Self> {
        journal.durable()?;
        let (stop, stopped) = std::sync::mpsc::channel();
        let (server, journal) = (Arc::clone(server), Arc::clone(journal));
        let run = supervisor.essential_thread("data", move || {
            if let Some(durable) = journal.durable() {
                Keeper::new(durable, &server.master, journal.beside(), pace).run(&stopped);
            }
        });
        match std::thread::Builder::new().name("data".to_owned()).spawn(run) {
            Ok(thread) => Some(Self { stop, thread }),
            Err(error) => {
                tracing::error!(%error, "no snapshots are written: there is no thread for them");
                None
            }
        }
    }

    fn end(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            tracing::error!("the thread that writes snapshots has failed");
        }
    }
}

/// Why a tenure ended as it began. What it was to be led from is left.
pub(super) struct NotLed {
    pub(super) why: String,
    pub(super) state: State,
}

impl Leading {
    /// Starts everything. Ticks run on `main`, where they may wait for followers. A panic of an essential task ends `process`.
    ///
    /// # Errors
    /// When a port cannot be had.
    pub(super) async fn begin(
        options: &TenureOptions,
        Led { server, journal, faces }: Led,
        me: &Member,
        (tenure, store): (Tenure, Lists),
        (main, process): (&Handle, &Supervisor),
    ) -> Result<Self, NotLed> {
        let supervisor = process.child();
        server.master.set_view_version(tenure.term);
        journal.lead(me);
        let deposed = CancellationToken::new();
        let rpc = match open(options, &server, &journal, tenure.term, faces, &supervisor).await {
            Ok(rpc) => rpc,
            Err(why) => {
                let _ = supervisor.shutdown(END).await;
                return Err(NotLed { why, state: state_of(server, &journal).await });
            }
        };
        let list = list(Arc::clone(&journal), tenure, store, options.patience, deposed.clone());
        let stop = supervisor.token();
        supervisor.spawn_essential("in-sync list", async move {
            tokio::select! {
                () = list => {}
                () = stop.cancelled() => {}
            }
        });
        if options.report {
            summary::start(&server, &supervisor);
        }
        {
            let _on = main.enter();
            ticker::start(&server, &supervisor);
        }
        let keeper = Keeping::start(&server, &journal, options.pace, &supervisor);
        Ok(Self { server, rpc, deposed, journal, supervisor, keeper })
    }

    /// Ends everything. Callers that wait are refused.
    pub(super) async fn end(self) -> State {
        self.journal.step_down();
        self.rpc.stop();
        if let Err(still) = self.supervisor.shutdown(END).await {
            tracing::warn!("{still}");
        }
        if let Some(keeper) = self.keeper {
            keeper.end();
        }
        state_of(self.server, &self.journal).await
    }
}

/// The state when nobody uses it any more. A change that came later would be missing in the log.
async fn state_of(server: Arc<Server>, journal: &Replicated) -> State {
    let begun = Instant::now();
    let mut told = false;
    while journal.durable().is_some() && Arc::strong_count(&server) > 1 {
        if begun.elapsed() > TOO_LONG && !std::mem::replace(&mut told, true) {
            tracing::error!("something still uses the state of a tenure that has ended; waiting for it");
        }
        sleep(LOOK).await;
    }
    let last = journal.seal();
    State::of(server, Arc::clone(journal.beside()), last)
}

/// Opens the ports.
async fn open(
    options: &TenureOptions,
    server: &Arc<Server>,
    journal: &Arc<Replicated>,
    term: i64,
    faces: Faces,
    supervisor: &Supervisor,
) -> Result<Rpc, String> {
    let followers = bind(options.replication).map_err(|error| error.to_string())?;
    let sessions = Sessions {
        server: Arc::clone(server),
        journal: Arc::clone(journal),
        term,
        patience: options.patience,
        tls: options.tls.clone(),
    };
    supervisor.spawn_essential("followers", sessions.listen(followers, supervisor.clone()));
    faces.start(server, supervisor).await.map_err(|error| error.to_string())?;
    rpc::serve(server, options.rpc, options.server.threads, supervisor).map_err(|error| error.to_string())
}

/// Where the in-sync list is kept, and how long that is waited for.
pub(super) struct Lists {
    pub(super) coordinator: Arc<dyn Coordinator>,
    pub(super) patience: Duration,
}

/// Gives silent followers up, and keeps the store's list in step with who is waited for.
async fn list(
    journal: Arc<Replicated>,
    tenure: Tenure,
    Lists { coordinator, patience: store_patience }: Lists,
    patience: Duration,
    deposed: CancellationToken,
) {
    // The list's revision; nothing if an attempt may have succeeded or not.
    let mut revision = Some(tenure.term);
    loop {
        let _ = timeout(LOOK, journal.relisted()).await;
        for member in journal.give_up(patience) {
            tracing::warn!(%member, "a follower is silent and is given up");
        }
        let Some(members) = journal.to_list() else { continue };
        if revision.is_none() {
            let seen = timeout(store_patience, coordinator.observe()).await;
            revision = seen.ok().and_then(Result::ok).map(|view| view.revision());
        }
        let Some(before) = revision.take() else { continue };
        match timeout(store_patience, coordinator.list(tenure, before, &members)).await {
            Ok(Ok(Listing::Stored(stored))) => {
                let all: Vec<String> = members.iter().map(|it| it.address.clone()).collect();
                tracing::info!(in_sync = all.join(" "), "may lead next");
                revision = Some(stored);
                journal.listed(members);
            }
            Ok(Ok(Listing::Changed)) => {}
            Ok(Ok(Listing::Deposed)) => return deposed.cancel(),
            Ok(Err(error)) => tracing::warn!(%error, "who may lead next cannot be stored; trying again"),
            Err(_) => tracing::warn!("who may lead next cannot be stored in time; trying again"),
        }
    }
}
