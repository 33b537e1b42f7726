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

use super::coordinator::{HaCoordinator, InSyncUpdateOutcome, LeaderTerm};
use super::fence::LeaseFence;
use super::member::HaMember;
use super::replicated_journal::ReplicatedJournal;
use super::replication_server::ReplicationServer;
use super::tls::TlsFiles;
use crate::aux_services::{AuxServices, AuxServicesOptions};
use crate::clock::MonotonicUnixClock;
use crate::durable::{DurableJournal, PersistenceSchedule, StatePersister};
use crate::rpc::{self, RpcServer};
use crate::server::{MasterServer, MasterServerOptions};
use crate::state::MasterState;
use crate::{summary, ticker};

/// How often it is looked for followers that are silent.
const FOLLOWER_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Time for calls in progress when a tenure ends. Nobody is answered by then.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// After which time it is told that a tenure does not end.
const SLOW_SHUTDOWN_WARNING: Duration = Duration::from_secs(10);

/// What a master leads with.
#[derive(Clone, Debug)]
pub struct LeadershipOptions {
    /// The server.
    pub server: MasterServerOptions,
    /// Where RPCs are served.
    pub rpc: SocketAddr,
    /// Where followers are served.
    pub replication: SocketAddr,
    /// What is served beside RPCs. A master that stands by serves its administration only.
    pub services: AuxServicesOptions,
    /// How often snapshots are written, if the state is on a disk.
    pub schedule: PersistenceSchedule,
    /// Bytes of facts that are kept for followers.
    pub journal_bytes: usize,
    /// After which silence a follower is given up.
    pub follower_timeout: Duration,
    /// For TLS between masters.
    pub tls: Option<TlsFiles>,
    /// Whether to log the most important figures every ten seconds.
    pub log_summary: bool,
}

/// A state to lead from, the journal of its changes, and what is served beside RPCs.
pub(super) struct PreparedLeadership {
    pub(super) server: Arc<MasterServer>,
    pub(super) journal: Arc<ReplicatedJournal>,
    pub(super) services: AuxServices,
}

impl LeadershipOptions {
    /// Makes a state ready to be led from.
    pub(super) fn prepare(
        &self,
        MasterState { master, aux: beside, last_record: last }: MasterState,
        durable: Option<Arc<DurableJournal>>,
        fence: &Arc<LeaseFence>,
    ) -> PreparedLeadership {
        let mut faces = AuxServices::new(self.services.clone());
        let (next, fence) = (last.saturating_add(1), Arc::clone(fence));
        let journal = Arc::new(ReplicatedJournal::new(next, self.journal_bytes, fence, beside, durable));
        let observed = faces.observe(journal.clone(), journal.aux());
        let server =
            MasterServer::with_state(self.server.clone(), *master, MonotonicUnixClock::start(), observed);
        server.master.finish_replay(server.clock.now_ms());
        if last == 0 {
            server.open_rebuild();
        }
        PreparedLeadership { server: Arc::new(server), journal, services: faces }
    }
}

/// A tenure that has begun.
pub(super) struct ActiveLeadership {
    pub(super) server: Arc<MasterServer>,
    pub(super) rpc: RpcServer,
    pub(super) deposed: CancellationToken,
    journal: Arc<ReplicatedJournal>,
    supervisor: Supervisor,
    persister: Option<LeaderPersisterThread>,
}

/// The thread that looks after the files of a leader's state.
struct LeaderPersisterThread {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl LeaderPersisterThread {
    /// Nothing if the state is in memory only, or if there is no thread: then the log only grows.
    fn start(
        server: &Arc<MasterServer>,
        journal: &Arc<ReplicatedJournal>,
        pace: PersistenceSchedule,
        supervisor: &Supervisor,
    ) -> Option<Self> {
        journal.durable()?;
        let (stop, stopped) = std::sync::mpsc::channel();
        let (server, journal) = (Arc::clone(server), Arc::clone(journal));
        let run = supervisor.wrap_essential_thread("data", move || {
            if let Some(durable) = journal.durable() {
                StatePersister::new(durable, &server.master, journal.aux(), pace).run(&stopped);
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
pub(super) struct LeadershipStartError {
    pub(super) reason: String,
    pub(super) state: MasterState,
}

impl ActiveLeadership {
    /// Starts everything. Ticks run on `main`, where they may wait for followers. A panic of an essential task ends `process`.
    ///
    /// # Errors
    /// When a port cannot be had.
    pub(super) async fn begin(
        options: &LeadershipOptions,
        PreparedLeadership { server, journal, services: faces }: PreparedLeadership,
        me: &HaMember,
        (tenure, store): (LeaderTerm, InSyncUpdater),
        (main, process): (&Handle, &Supervisor),
    ) -> Result<Self, LeadershipStartError> {
        let supervisor = process.child();
        server.master.set_view_version(tenure.term);
        journal.lead(me);
        let deposed = CancellationToken::new();
        let rpc = match open(options, &server, &journal, tenure.term, faces, &supervisor).await {
            Ok(rpc) => rpc,
            Err(why) => {
                let _ = supervisor.shutdown(SHUTDOWN_GRACE).await;
                return Err(LeadershipStartError {
                    reason: why,
                    state: reclaim_state(server, &journal).await,
                });
            }
        };
        let list =
            update_in_sync(Arc::clone(&journal), tenure, store, options.follower_timeout, deposed.clone());
        let stop = supervisor.token();
        supervisor.spawn_essential("in-sync list", async move {
            tokio::select! {
                () = list => {}
                () = stop.cancelled() => {}
            }
        });
        if options.log_summary {
            summary::start(&server, &supervisor);
        }
        {
            let _on = main.enter();
            ticker::start(&server, &supervisor);
        }
        let keeper = LeaderPersisterThread::start(&server, &journal, options.schedule, &supervisor);
        Ok(Self { server, rpc, deposed, journal, supervisor, persister: keeper })
    }

    /// Ends everything. Callers that wait are refused.
    pub(super) async fn end(self) -> MasterState {
        self.journal.step_down();
        self.rpc.stop();
        if let Err(still) = self.supervisor.shutdown(SHUTDOWN_GRACE).await {
            tracing::warn!("{still}");
        }
        if let Some(keeper) = self.persister {
            keeper.end();
        }
        reclaim_state(self.server, &self.journal).await
    }
}

/// The state when nobody uses it any more. A change that came later would be missing in the log.
async fn reclaim_state(server: Arc<MasterServer>, journal: &ReplicatedJournal) -> MasterState {
    let begun = Instant::now();
    let mut told = false;
    while journal.durable().is_some() && Arc::strong_count(&server) > 1 {
        if begun.elapsed() > SLOW_SHUTDOWN_WARNING && !std::mem::replace(&mut told, true) {
            tracing::error!("something still uses the state of a tenure that has ended; waiting for it");
        }
        sleep(FOLLOWER_CHECK_INTERVAL).await;
    }
    let last = journal.seal();
    MasterState::from_server(server, Arc::clone(journal.aux()), last)
}

/// Opens the ports.
async fn open(
    options: &LeadershipOptions,
    server: &Arc<MasterServer>,
    journal: &Arc<ReplicatedJournal>,
    term: i64,
    faces: AuxServices,
    supervisor: &Supervisor,
) -> Result<RpcServer, String> {
    let followers = bind(options.replication).map_err(|error| error.to_string())?;
    let sessions = ReplicationServer {
        server: Arc::clone(server),
        journal: Arc::clone(journal),
        term,
        follower_timeout: options.follower_timeout,
        tls: options.tls.clone(),
    };
    supervisor.spawn_essential("followers", sessions.listen(followers, supervisor.clone()));
    faces.start(server, supervisor).await.map_err(|error| error.to_string())?;
    rpc::serve(server, options.rpc, options.server.threads, supervisor).map_err(|error| error.to_string())
}

/// Where the in-sync list is kept, and how long that is waited for.
pub(super) struct InSyncUpdater {
    pub(super) coordinator: Arc<dyn HaCoordinator>,
    pub(super) response_timeout: Duration,
}

/// Gives silent followers up, and keeps the store's list in step with who is waited for.
async fn update_in_sync(
    journal: Arc<ReplicatedJournal>,
    tenure: LeaderTerm,
    InSyncUpdater { coordinator, response_timeout: store_patience }: InSyncUpdater,
    patience: Duration,
    deposed: CancellationToken,
) {
    // The list's revision; nothing if an attempt may have succeeded or not.
    let mut revision = Some(tenure.term);
    loop {
        let _ = timeout(FOLLOWER_CHECK_INTERVAL, journal.in_sync_changed()).await;
        for member in journal.remove_silent(patience) {
            tracing::warn!(%member, "a follower is silent and is given up");
        }
        let Some(members) = journal.pending_in_sync() else { continue };
        if revision.is_none() {
            let seen = timeout(store_patience, coordinator.observe()).await;
            revision = seen.ok().and_then(Result::ok).map(|view| view.revision());
        }
        let Some(before) = revision.take() else { continue };
        match timeout(store_patience, coordinator.update_in_sync(tenure, before, &members)).await {
            Ok(Ok(InSyncUpdateOutcome::Stored(stored))) => {
                let all: Vec<String> = members.iter().map(|it| it.address.clone()).collect();
                tracing::info!(in_sync = all.join(" "), "may lead next");
                revision = Some(stored);
                journal.confirm_in_sync(members);
            }
            Ok(Ok(InSyncUpdateOutcome::Conflict)) => {}
            Ok(Ok(InSyncUpdateOutcome::Deposed)) => return deposed.cancel(),
            Ok(Err(error)) => tracing::warn!(%error, "who may lead next cannot be stored; trying again"),
            Err(_) => tracing::warn!("who may lead next cannot be stored in time; trying again"),
        }
    }
}
