//! Everything that runs only while this master is the leader.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use moongate_master_core::{MasterCore, SnapshotCursor, StateChange, StateChangeSink};
use moongate_runtime::{BindError, Supervisor, bind};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::coordinator::{HaCoordinator, InSyncUpdateOutcome, LeaderTerm};
use super::fence::LeaseFence;
use super::member::HaMember;
use super::replicated_journal::ReplicatedJournal;
use super::replication_server::ReplicationServer;
use super::tls::TlsFiles;
use crate::aux_services::{AuxServiceError, AuxServices, AuxServicesOptions};
use crate::clock::MonotonicUnixClock;
use crate::durable::{DurableJournal, PersistenceSchedule, ReplayThreads, StatePersister};
use crate::rpc::{self, RpcServer, RpcServerError};
use crate::server::{MasterServer, MasterServerOptions};
use crate::state::{MasterState, SLOTS_PER_LOCK};
use crate::{summary, ticker};

/// Interval of the check for silent followers.
const FOLLOWER_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Time for in-flight calls when leadership ends. They get an error by then.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// A leadership that takes longer than this to end is logged.
const SLOW_SHUTDOWN_WARNING: Duration = Duration::from_secs(10);

/// Settings of the leader's services.
#[derive(Clone, Debug)]
pub struct LeadershipOptions {
    pub server: MasterServerOptions,
    /// Listen address of the RPC port.
    pub rpc: SocketAddr,
    /// Listen address of the replication port.
    pub replication: SocketAddr,
    /// Services other than RPC. A standby master serves the admin interface only.
    pub services: AuxServicesOptions,
    /// Snapshot schedule, if the state is on disk.
    pub schedule: PersistenceSchedule,
    /// Maximum size of the in-memory record buffer for followers, in bytes.
    pub journal_bytes: usize,
    /// A follower without a frame for this long leaves the in-sync set.
    pub follower_timeout: Duration,
    /// Files for mutual TLS between masters.
    pub tls: Option<TlsFiles>,
    /// Whether to log a summary of the metrics every ten seconds.
    pub log_summary: bool,
}

/// A loaded state with its journal and services, ready for leadership.
pub(super) struct PreparedLeadership {
    pub(super) server: Arc<MasterServer>,
    pub(super) journal: Arc<ReplicatedJournal>,
    pub(super) services: AuxServices,
}

impl LeadershipOptions {
    /// Builds the server, the journal and the services around a state.
    pub(super) fn prepare(
        &self,
        MasterState { master, aux, last_record: last }: MasterState,
        durable: Option<Arc<DurableJournal>>,
        fence: &Arc<LeaseFence>,
    ) -> PreparedLeadership {
        let mut services = AuxServices::new(self.services.clone());
        let (next, fence) = (last.saturating_add(1), Arc::clone(fence));
        let journal = Arc::new(ReplicatedJournal::new(next, self.journal_bytes, fence, aux, durable));
        let observed = services.observe(journal.clone(), journal.aux());
        let server =
            MasterServer::with_state(self.server.clone(), *master, MonotonicUnixClock::start(), observed);
        server.master.finish_replay(server.clock.now_ms(), &ReplayThreads::default());
        if last == 0 {
            server.open_rebuild();
        }
        PreparedLeadership { server: Arc::new(server), journal, services }
    }
}

/// A running leadership: the server, its ports and its tasks.
pub(super) struct ActiveLeadership {
    pub(super) server: Arc<MasterServer>,
    pub(super) rpc: RpcServer,
    pub(super) deposed: CancellationToken,
    journal: Arc<ReplicatedJournal>,
    supervisor: Supervisor,
    persister: Option<LeaderPersisterThread>,
}

/// The thread that writes snapshots of a leader's state.
struct LeaderPersisterThread {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl LeaderPersisterThread {
    /// `None` if the state is in memory only, or if the thread cannot be started: then the log grows without snapshots.
    fn start(
        server: &Arc<MasterServer>,
        journal: &Arc<ReplicatedJournal>,
        schedule: PersistenceSchedule,
        supervisor: &Supervisor,
    ) -> Option<Self> {
        journal.durable()?;
        let (stop, stopped) = std::sync::mpsc::channel();
        let (server, journal) = (Arc::clone(server), Arc::clone(journal));
        let run = supervisor.wrap_essential_thread("data", move || {
            if let Some(durable) = journal.durable() {
                StatePersister::new(durable, &server.master, journal.aux(), schedule).run(&stopped);
            }
        });
        match std::thread::Builder::new().name("data".to_owned()).spawn(run) {
            Ok(thread) => Some(Self { stop, thread }),
            Err(error) => {
                tracing::error!(%error, "cannot start the snapshot thread; no snapshots are written");
                None
            }
        }
    }

    fn end(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            tracing::error!("the snapshot thread panicked");
        }
    }
}

/// A port or a service of the leader could not be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum LeadershipStartError {
    #[error(transparent)]
    Replication(#[from] BindError),
    #[error(transparent)]
    Services(#[from] AuxServiceError),
    #[error(transparent)]
    Rpc(#[from] RpcServerError),
}

/// A leadership that could not be started, with the unchanged state.
pub(super) struct FailedLeadership {
    pub(super) error: LeadershipStartError,
    pub(super) state: MasterState,
}

/// The leader, and where its tasks run.
pub(super) struct LeadershipContext<'a> {
    pub(super) member: &'a HaMember,
    pub(super) leader_term: LeaderTerm,
    pub(super) in_sync_updater: InSyncUpdater,
    /// Runtime of the ticker, which may block on followers.
    pub(super) blocking_runtime: &'a Handle,
    pub(super) supervisor: &'a Supervisor,
}

impl ActiveLeadership {
    /// Starts everything. A panic of an essential task ends the process.
    ///
    /// # Errors
    /// A port cannot be opened.
    pub(super) async fn begin(
        options: &LeadershipOptions,
        PreparedLeadership { server, journal, services }: PreparedLeadership,
        context: LeadershipContext<'_>,
    ) -> Result<Self, FailedLeadership> {
        let LeadershipContext { member, leader_term, in_sync_updater, .. } = context;
        let supervisor = context.supervisor.child();
        server.master.set_view_version(leader_term.term);
        journal.lead(member);
        let deposed = CancellationToken::new();
        let rpc = match open(options, &server, &journal, leader_term.term, services, &supervisor).await {
            Ok(rpc) => rpc,
            Err(error) => {
                let _ = supervisor.shutdown(SHUTDOWN_GRACE).await;
                return Err(FailedLeadership { error, state: reclaim_state(server, &journal).await });
            }
        };
        let update_task = update_in_sync(
            Arc::clone(&journal),
            leader_term,
            in_sync_updater,
            options.follower_timeout,
            deposed.clone(),
        );
        let stop = supervisor.token();
        supervisor.spawn_essential("in-sync updater", async move {
            tokio::select! {
                () = update_task => {}
                () = stop.cancelled() => {}
            }
        });
        if options.log_summary {
            summary::start(&server, &supervisor);
        }
        {
            let _runtime = context.blocking_runtime.enter();
            ticker::start(&server, &supervisor);
        }
        let persister = LeaderPersisterThread::start(&server, &journal, options.schedule, &supervisor);
        Ok(Self { server, rpc, deposed, journal, supervisor, persister })
    }

    /// Stops everything. Pending calls fail.
    pub(super) async fn end(self) -> MasterState {
        self.journal.step_down();
        self.rpc.stop();
        if let Err(error) = self.supervisor.shutdown(SHUTDOWN_GRACE).await {
            tracing::warn!("{error}");
        }
        if let Some(persister) = self.persister {
            persister.end();
        }
        reclaim_state(self.server, &self.journal).await
    }
}

/// Recovers the state after its last user has gone. A later change would be missing in the log.
async fn reclaim_state(server: Arc<MasterServer>, journal: &ReplicatedJournal) -> MasterState {
    let started = Instant::now();
    let mut warned = false;
    while journal.durable().is_some() && Arc::strong_count(&server) > 1 {
        if started.elapsed() > SLOW_SHUTDOWN_WARNING && !std::mem::replace(&mut warned, true) {
            tracing::error!("waiting for the last user of the previous leader state");
        }
        sleep(FOLLOWER_CHECK_INTERVAL).await;
    }
    let last = journal.seal();
    MasterState { master: Box::new(into_master(server)), aux: Arc::clone(journal.aux()), last_record: last }
}

/// The state machine of a server that has stopped; a copy if the server still has users.
fn into_master(server: Arc<MasterServer>) -> MasterCore {
    Arc::try_unwrap(server).map(MasterServer::into_master).unwrap_or_else(|shared| {
        let mut copy = FactApplier(MasterCore::new(shared.master.settings().clone()));
        let mut cursor = Some(SnapshotCursor::default());
        while let Some(from) = cursor {
            cursor = shared.master.snapshot(from, SLOTS_PER_LOCK, &mut copy);
        }
        copy.0
    })
}

/// Applies changes to a state machine; those that do not apply are skipped.
struct FactApplier(MasterCore);

impl StateChangeSink for FactApplier {
    fn record(&mut self, fact: StateChange<'_>) {
        let _ = self.0.apply(&fact);
    }
}

/// Opens the RPC port, the replication port and the ports of the other services.
async fn open(
    options: &LeadershipOptions,
    server: &Arc<MasterServer>,
    journal: &Arc<ReplicatedJournal>,
    term: i64,
    services: AuxServices,
    supervisor: &Supervisor,
) -> Result<RpcServer, LeadershipStartError> {
    let followers = bind(options.replication)?;
    let sessions = ReplicationServer {
        server: Arc::clone(server),
        journal: Arc::clone(journal),
        term,
        follower_timeout: options.follower_timeout,
        tls: options.tls.clone(),
    };
    supervisor.spawn_essential("followers", sessions.listen(followers, supervisor.clone()));
    services.start(server, supervisor).await?;
    Ok(rpc::serve(server, options.rpc, options.server.threads, supervisor)?)
}

/// The coordinator that stores the in-sync set, and the timeout of its requests.
pub(super) struct InSyncUpdater {
    pub(super) coordinator: Arc<dyn HaCoordinator>,
    pub(super) response_timeout: Duration,
}

/// Removes silent followers and keeps the stored in-sync set up to date.
async fn update_in_sync(
    journal: Arc<ReplicatedJournal>,
    leader_term: LeaderTerm,
    InSyncUpdater { coordinator, response_timeout }: InSyncUpdater,
    follower_timeout: Duration,
    deposed: CancellationToken,
) {
    // Revision of the stored set; `None` if the result of the last update is unknown.
    let mut revision = Some(leader_term.term);
    loop {
        let _ = timeout(FOLLOWER_CHECK_INTERVAL, journal.in_sync_changed()).await;
        for member in journal.remove_silent(follower_timeout) {
            tracing::warn!(%member, "follower timed out; removed from the in-sync set");
        }
        let Some(members) = journal.pending_in_sync() else { continue };
        if revision.is_none() {
            let view = timeout(response_timeout, coordinator.observe()).await;
            revision = view.ok().and_then(Result::ok).map(|view| view.revision());
        }
        let Some(before) = revision.take() else { continue };
        match timeout(response_timeout, coordinator.update_in_sync(leader_term, before, &members)).await {
            Ok(Ok(InSyncUpdateOutcome::Stored(stored))) => {
                let all: Vec<String> = members.iter().map(|member| member.address.clone()).collect();
                tracing::info!(in_sync = all.join(" "), "in-sync set updated");
                revision = Some(stored);
                journal.confirm_in_sync(members);
            }
            Ok(Ok(InSyncUpdateOutcome::Conflict)) => {}
            Ok(Ok(InSyncUpdateOutcome::Deposed)) => return deposed.cancel(),
            Ok(Err(error)) => tracing::warn!(%error, "cannot update the in-sync set; retrying"),
            Err(_) => tracing::warn!("timed out updating the in-sync set; retrying"),
        }
    }
}
