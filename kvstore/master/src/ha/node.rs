//! One master in HA mode: a loop of standby and leadership.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::coordinator::{CoordinationError, HaCoordinator, LeaderTerm};
use super::elector::{ElectionAction, ElectionResponse, ElectionTimings, ElectorOutput, LeaderElector};
use super::exit_watcher::LeaseReporter;
use super::fence::{LeaseFence, now};
use super::leadership::{
    ActiveLeadership, FailedLeadership, InSyncUpdater, LeadershipContext, LeadershipOptions,
};
use super::link::{self, FollowerLinkOptions};
use super::member::HaMember;
use super::member_folder::MemberFolder;
use super::standby_journal::StandbyJournal;
use super::standby_replica::StandbyReplica;
use crate::aux_services::{AuxServices, AuxServicesOptions};
use crate::server::{HaState, LeadershipStatus, MasterRole, MasterServer};
use crate::state::MasterState;

/// Pause before the connection to a leader is retried.
const RETRY: Duration = Duration::from_millis(100);
/// Time for in-flight admin requests when this master becomes leader.
const ADMIN_SHUTDOWN_GRACE: Duration = Duration::from_millis(100);

/// Why the coordinator did not execute an action.
#[derive(Debug, thiserror::Error)]
enum ElectionRequestError {
    #[error(transparent)]
    Coordination(#[from] CoordinationError),
    #[error("request timed out")]
    TimedOut,
}

/// Settings of a master in HA mode.
#[derive(Clone, Debug)]
pub struct HaOptions {
    /// Address of the RPC port for clients, unique among the masters.
    pub address: String,
    /// Address of the replication port for followers.
    pub replication_address: String,
    pub timings: ElectionTimings,
    /// Whether it may become leader once without being in sync.
    pub force: bool,
    /// Settings of its services while it leads.
    pub leadership: LeadershipOptions,
}

/// Status of a master in HA mode, shared with other tasks.
#[derive(Debug)]
pub struct HaNodeStatus {
    /// Its role and the current leader.
    pub leadership: ArcSwap<LeadershipStatus>,
    /// The current server: the leader's, or the standby's.
    pub server: Mutex<Option<Arc<MasterServer>>>,
    /// Whether it is the leader and serves RPCs.
    pub serves: watch::Sender<bool>,
}

impl HaNodeStatus {
    /// Status of a master that was just started.
    pub fn new() -> Self {
        Self {
            leadership: ArcSwap::from_pointee(LeadershipStatus::starting()),
            server: Mutex::new(None),
            serves: watch::Sender::new(false),
        }
    }
}

impl Default for HaNodeStatus {
    fn default() -> Self {
        Self::new()
    }
}

/// What a master in HA mode depends on.
pub struct HaNodeContext {
    pub coordinator: Arc<dyn HaCoordinator>,
    pub status: Arc<HaNodeStatus>,
    /// Its tasks belong to it.
    pub supervisor: Supervisor,
    pub lease_reporter: LeaseReporter,
    /// Runtime of its ticker, which may block on followers.
    pub blocking_runtime: Handle,
}

/// A master in HA mode.
pub struct HaNode {
    options: HaOptions,
    coordinator: Arc<dyn HaCoordinator>,
    elector: LeaderElector,
    member: HaMember,
    fence: Arc<LeaseFence>,
    replica: Arc<Mutex<StandbyReplica>>,
    status: Arc<HaNodeStatus>,
    supervisor: Supervisor,
    stop: CancellationToken,
    lease_reporter: LeaseReporter,
    /// Runtime on which tasks may block.
    blocking_runtime: Handle,
    follow_task: Option<FollowTask>,
    /// Tasks that serve the admin interface while standby.
    standby_services: Option<Supervisor>,
    /// Whether the last request to the coordinator failed.
    coordinator_unreachable: bool,
}

/// The task that follows the leader of one term.
struct FollowTask {
    term: i64,
    task: JoinHandle<()>,
}

impl HaNode {
    /// A master with an empty state, or with the state of a folder.
    pub fn new(
        options: HaOptions,
        disk: Option<(MemberFolder, MasterState)>,
        context: HaNodeContext,
    ) -> Self {
        let HaNodeContext { coordinator, status, supervisor, lease_reporter, blocking_runtime } = context;
        let settings = options.leadership.server.core.clone();
        let (member, replica) = match disk {
            Some((disk, state)) => {
                let member = HaMember::with_incarnation(options.address.clone(), disk.incarnation());
                (member, StandbyReplica::on_disk(settings, disk, state))
            }
            None => (HaMember::new(options.address.clone()), StandbyReplica::new(settings)),
        };
        let elector = LeaderElector::new(
            member.clone(),
            options.replication_address.clone(),
            options.timings,
            options.force,
        );
        let replica = Arc::new(Mutex::new(replica));
        Self {
            coordinator,
            elector,
            member,
            fence: Arc::default(),
            replica,
            status,
            stop: supervisor.token(),
            supervisor,
            lease_reporter,
            blocking_runtime,
            follow_task: None,
            standby_services: None,
            coordinator_unreachable: false,
            options,
        }
    }

    /// Takes part in elections until the supervisor's shutdown.
    pub async fn run(mut self) {
        while !self.stop.is_cancelled() {
            let Some(leader_term) = self.stand_by().await else { break };
            self.stop_following().await;
            self.lead(leader_term).await;
        }
        self.stop_following().await;
        self.replica.lock().close();
        self.publish_state(HaState::Stopping);
        self.close_standby().await;
    }

    /// Follows the current leader until this master is elected. `None` if it is stopped.
    async fn stand_by(&mut self) -> Option<LeaderTerm> {
        loop {
            if let Some((leader_term, _)) = self.elector.leading(now()) {
                return Some(leader_term);
            }
            self.open_standby().await;
            self.publish_state(HaState::Standby);
            self.follow_leader().await;
            match self.elector.poll(now()) {
                ElectorOutput::Act(action) => self.execute_action(action).await,
                ElectorOutput::Wait(until) => {
                    let stop = self.stop.clone();
                    tokio::select! {
                        () = sleep(until.saturating_sub(now())) => {}
                        () = stop.cancelled() => return None,
                    }
                }
            }
            if self.stop.is_cancelled() {
                return None;
            }
        }
    }

    /// Serves clients as the leader until the lease ends.
    async fn lead(&mut self, leader_term: LeaderTerm) {
        let started = now();
        self.lease_reporter.report(Some(leader_term));
        self.close_standby().await;
        let (state, durable) = self.replica.lock().take_state();
        let prepared = self.options.leadership.prepare(state, durable, &self.fence);
        let in_sync_updater = InSyncUpdater {
            coordinator: Arc::clone(&self.coordinator),
            response_timeout: self.options.timings.response_timeout(),
        };
        let context = LeadershipContext {
            member: &self.member,
            leader_term,
            in_sync_updater,
            blocking_runtime: &self.blocking_runtime,
            supervisor: &self.supervisor,
        };
        let start = ActiveLeadership::begin(&self.options.leadership, prepared, context);
        let state = match start.await {
            Ok(leadership) => {
                let (rpc, keys) = (leadership.rpc.address(), leadership.server.master.key_count());
                tracing::info!(term = leader_term.term, %rpc, keys, elapsed = ?(now() - started), "became leader");
                *self.status.server.lock() = Some(Arc::clone(&leadership.server));
                self.publish_state(HaState::Serving);
                self.hold_lease(leader_term, &leadership.deposed).await;
                self.fence.revoke();
                tracing::warn!(term = leader_term.term, "lost leadership");
                self.publish_state(HaState::Standby);
                *self.status.server.lock() = None;
                // No client gets a reply any more, so another master may lead while the services are shut down.
                self.release_lease().await;
                leadership.end().await
            }
            Err(FailedLeadership { error, state }) => {
                tracing::error!(%error, "cannot become leader");
                sleep(self.options.timings.lease).await;
                self.release_lease().await;
                state
            }
        };
        self.replica.lock().return_state(state);
    }

    /// Serves the admin interface of a standby: its server has an empty state, and requests for data fail.
    async fn open_standby(&mut self) {
        if self.standby_services.is_some() {
            return;
        }
        let options = &self.options.leadership;
        let services =
            AuxServicesOptions { metadata: None, events: None, quotas: None, ..options.services.clone() };
        let journal = Arc::new(StandbyJournal(Arc::clone(&self.replica)));
        let (server, supervisor) =
            (MasterServer::new(options.server.clone(), journal), self.supervisor.child());
        let server = Arc::new(server);
        if let Err(error) = AuxServices::new(services).start(&server, &supervisor).await {
            tracing::error!(%error, "cannot serve the admin interface while standby");
        }
        *self.status.server.lock() = Some(server);
        self.standby_services = Some(supervisor);
    }

    async fn close_standby(&mut self) {
        *self.status.server.lock() = None;
        if let Some(supervisor) = self.standby_services.take() {
            let _ = supervisor.shutdown(ADMIN_SHUTDOWN_GRACE).await;
        }
    }

    /// Renews the lease until it ends or this master is stopped or deposed.
    async fn hold_lease(&mut self, leader_term: LeaderTerm, deposed: &CancellationToken) {
        let (stop, deposed) = (self.stop.clone(), deposed.clone());
        loop {
            match self.elector.leading(now()) {
                Some((current, until)) if current == leader_term => self.fence.extend(until),
                _ => return,
            }
            let due = self.elector.poll(now());
            tokio::select! {
                () = stop.cancelled() => return,
                () = deposed.cancelled() => return self.elector.mark_deposed(),
                () = async {
                    match due {
                        ElectorOutput::Act(action) => self.execute_action(action).await,
                        ElectorOutput::Wait(until) => sleep(until.saturating_sub(now())).await,
                    }
                } => {}
            }
        }
    }

    /// Releases the lease, so that another master can be elected at once.
    async fn release_lease(&mut self) {
        self.elector.step_down();
        if let ElectorOutput::Act(action @ ElectionAction::Resign(_)) = self.elector.poll(now()) {
            self.execute_action(action).await;
        }
        self.lease_reporter.report(None);
    }

    async fn execute_action(&mut self, action: ElectionAction) {
        if matches!(action, ElectionAction::Campaign(_)) {
            self.stop_following().await;
        }
        let sent = now();
        let coordinator = &self.coordinator;
        let request = async {
            Ok(match &action {
                ElectionAction::Observe => ElectionResponse::View(coordinator.observe().await?),
                ElectionAction::Campaign(candidacy) => {
                    ElectionResponse::CampaignResult(coordinator.campaign(candidacy).await?)
                }
                ElectionAction::Renew(leader_term) => {
                    ElectionResponse::Renewed(coordinator.renew(*leader_term).await?)
                }
                ElectionAction::Withdraw(revision, members) => {
                    coordinator.update_in_sync_without_leader(*revision, members).await?;
                    ElectionResponse::Done
                }
                ElectionAction::Resign(leader_term) => {
                    coordinator.resign(*leader_term).await?;
                    ElectionResponse::Done
                }
            })
        };
        let response = match timeout(self.options.timings.response_timeout(), request).await {
            Ok(response) => response.map_err(ElectionRequestError::Coordination),
            Err(_) => Err(ElectionRequestError::TimedOut),
        };
        // Logged once per outage, not for every request.
        match &response {
            Err(error) if !std::mem::replace(&mut self.coordinator_unreachable, true) => {
                tracing::warn!(%error, "coordinator unreachable");
            }
            Ok(_) if std::mem::take(&mut self.coordinator_unreachable) => {
                tracing::info!("coordinator reachable again");
            }
            _ => {}
        }
        self.elector.handle_response(sent, now(), response.unwrap_or(ElectionResponse::Failed));
    }

    /// Connects to the leader of the last election view.
    async fn follow_leader(&mut self) {
        let Some(leader) = self.elector.leader() else { return };
        let Some(address) = leader.replication.clone() else { return };
        let term = leader.term;
        if self.follow_task.as_ref().is_some_and(|task| task.term == term && !task.task.is_finished()) {
            return;
        }
        let is_new_term = self.follow_task.as_ref().is_none_or(|task| task.term != term);
        self.stop_following().await;
        let (member, replica) = (self.member.clone(), Arc::clone(&self.replica));
        let connection = FollowerLinkOptions {
            frame_timeout: self.options.leadership.follower_timeout,
            tls: self.options.leadership.tls.clone(),
        };
        let task = self.supervisor.spawn("following", async move {
            let error = link::follow(address, member, term, replica, connection).await;
            // Logged once per term, not for every attempt.
            match is_new_term {
                true => tracing::info!(%error, term, "replication interrupted; retrying"),
                false => tracing::debug!(%error, term, "replication attempt failed"),
            }
            sleep(RETRY).await;
        });
        self.follow_task = Some(FollowTask { term, task });
    }

    /// Aborts the follow task. After this returns, no further record is acknowledged.
    async fn stop_following(&mut self) {
        if let Some(FollowTask { task, .. }) = self.follow_task.take() {
            task.abort();
            let _ = task.await;
        }
    }

    fn publish_state(&self, state: HaState) {
        let role = if state == HaState::Serving { MasterRole::Leader } else { MasterRole::Standby };
        let (leader_address, view_version) = match (self.elector.leading(now()), self.elector.leader()) {
            (Some((leader_term, _)), _) => (Some(self.member.address.clone()), Some(leader_term.term)),
            (None, Some(leader)) => (Some(leader.address.clone()), Some(leader.term)),
            (None, None) => (None, None),
        };
        self.status.serves.send_replace(state == HaState::Serving);
        self.status.leadership.store(Arc::new(LeadershipStatus {
            role,
            state,
            leader_address,
            view_version,
        }));
        if let Some(server) = &*self.status.server.lock() {
            server.leadership.store(self.status.leadership.load_full());
        }
    }
}
