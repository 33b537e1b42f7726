//! One master among others: it stands by, leads, and stands by again.

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

use super::coordinator::{HaCoordinator, LeaderTerm};
use super::elector::{ElectionAction, ElectionResponse, ElectionTimings, ElectorOutput, LeaderElector};
use super::fence::{LeaseFence, now};
use super::leadership::{ActiveLeadership, InSyncUpdater, LeadershipOptions, LeadershipStartError};
use super::link;
use super::member::HaMember;
use super::member_folder::MemberFolder;
use super::standby_journal::StandbyJournal;
use super::standby_replica::StandbyReplica;
use crate::aux_services::{AuxServices, AuxServicesOptions};
use crate::server::{HaState, LeadershipStatus, MasterRole, MasterServer};
use crate::state::MasterState;

/// Pause before a leader that could not be followed is tried again.
const RETRY: Duration = Duration::from_millis(100);
/// Time for requests to the administration when this master begins to lead.
const ADMIN_SHUTDOWN_GRACE: Duration = Duration::from_millis(100);

/// How a master takes part.
#[derive(Clone, Debug)]
pub struct HaOptions {
    /// Where clients reach this master when it leads. No other has the same.
    pub address: String,
    /// Where followers reach it then.
    pub replication_address: String,
    /// Times of elections.
    pub timings: ElectionTimings,
    /// Whether it may lead once although others may know more.
    pub force: bool,
    /// What it leads with.
    pub leadership: LeadershipOptions,
}

/// What others may know of a master among others.
#[derive(Debug)]
pub struct HaNodeStatus {
    /// Its part.
    pub leadership: ArcSwap<LeadershipStatus>,
    /// What it serves with now.
    pub server: Mutex<Option<Arc<MasterServer>>>,
    /// Whether it leads and serves.
    pub serves: watch::Sender<bool>,
}

impl HaNodeStatus {
    /// A master that has just been started.
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

/// A master among others.
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
    /// Where blocking is allowed.
    blocking_runtime: Handle,
    follow_task: Option<FollowTask>,
    /// What serves the administration while standing by.
    standby_services: Option<Supervisor>,
    /// Whether the store did not answer the last question.
    coordinator_unreachable: bool,
}

/// A leader that is followed.
struct FollowTask {
    term: i64,
    task: JoinHandle<()>,
}

impl HaNode {
    /// A master with an empty state, or with one from a disk. Its tasks belong to `supervisor`; its ticks run on `main`, where they may
    /// wait for followers.
    pub fn new(
        options: HaOptions,
        disk: Option<(MemberFolder, MasterState)>,
        coordinator: Arc<dyn HaCoordinator>,
        status: Arc<HaNodeStatus>,
        supervisor: Supervisor,
        blocking_runtime: Handle,
    ) -> Self {
        let settings = options.leadership.server.core.clone();
        let (member, replica) = match disk {
            Some((disk, state)) => {
                let me = HaMember::with_incarnation(options.address.clone(), disk.incarnation());
                (me, StandbyReplica::on_disk(settings, disk, state))
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
            blocking_runtime,
            follow_task: None,
            standby_services: None,
            coordinator_unreachable: false,
            options,
        }
    }

    /// Takes part until the supervisor's shutdown.
    pub async fn run(mut self) {
        while !self.stop.is_cancelled() {
            let Some(tenure) = self.stand_by().await else { break };
            self.stop_following().await;
            self.lead(tenure).await;
        }
        self.stop_following().await;
        self.replica.lock().close();
        self.publish_state(HaState::Stopping);
        self.close_standby().await;
    }

    /// Follows whoever leads, until this master does. Nothing if it is stopped.
    async fn stand_by(&mut self) -> Option<LeaderTerm> {
        loop {
            if let Some((tenure, _)) = self.elector.leading(now()) {
                return Some(tenure);
            }
            self.open_standby().await;
            self.publish_state(HaState::Standby);
            self.follow_leader().await;
            match self.elector.poll(now()) {
                ElectorOutput::Act(ask) => self.execute_action(ask).await,
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

    /// Answers callers, until the right to do so ends.
    async fn lead(&mut self, tenure: LeaderTerm) {
        let begun = now();
        self.close_standby().await;
        let (state, durable) = self.replica.lock().take_state();
        let led = self.options.leadership.prepare(state, durable, &self.fence);
        let store = InSyncUpdater {
            coordinator: Arc::clone(&self.coordinator),
            response_timeout: self.options.timings.response_timeout(),
        };
        let process = (&self.blocking_runtime, &self.supervisor);
        let begin =
            ActiveLeadership::begin(&self.options.leadership, led, &self.member, (tenure, store), process);
        let state = match begin.await {
            Ok(leading) => {
                let (rpc, keys) = (leading.rpc.address(), leading.server.master.key_count());
                tracing::info!(term = tenure.term, %rpc, keys, took = ?(now() - begun), "leads");
                *self.status.server.lock() = Some(Arc::clone(&leading.server));
                self.publish_state(HaState::Serving);
                self.hold_lease(tenure, &leading.deposed).await;
                self.fence.revoke();
                tracing::warn!(term = tenure.term, "leads no more");
                self.publish_state(HaState::Standby);
                *self.status.server.lock() = None;
                // Nobody is answered any more, so another may begin while this tenure is ended.
                self.release_lease().await;
                leading.end().await
            }
            Err(LeadershipStartError { reason: why, state }) => {
                tracing::error!(why, "cannot lead");
                sleep(self.options.timings.lease).await;
                self.release_lease().await;
                state
            }
        };
        self.replica.lock().return_state(state);
    }

    /// Serves the administration of a master that stands by: it has an empty state and answers nothing about data.
    async fn open_standby(&mut self) {
        if self.standby_services.is_some() {
            return;
        }
        let options = &self.options.leadership;
        let faces =
            AuxServicesOptions { metadata: None, events: None, quotas: None, ..options.services.clone() };
        let journal = Arc::new(StandbyJournal(Arc::clone(&self.replica)));
        let (server, supervisor) =
            (MasterServer::new(options.server.clone(), journal), self.supervisor.child());
        let server = Arc::new(server);
        if let Err(error) = AuxServices::new(faces).start(&server, &supervisor).await {
            tracing::error!(%error, "the administration cannot be served while standing by");
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

    /// Renews the lease, until that ends or this master is stopped or deposed.
    async fn hold_lease(&mut self, tenure: LeaderTerm, deposed: &CancellationToken) {
        let (stop, deposed) = (self.stop.clone(), deposed.clone());
        loop {
            match self.elector.leading(now()) {
                Some((it, until)) if it == tenure => self.fence.extend(until),
                _ => return,
            }
            let due = self.elector.poll(now());
            tokio::select! {
                () = stop.cancelled() => return,
                () = deposed.cancelled() => return self.elector.mark_deposed(),
                () = async {
                    match due {
                        ElectorOutput::Act(ask) => self.execute_action(ask).await,
                        ElectorOutput::Wait(until) => sleep(until.saturating_sub(now())).await,
                    }
                } => {}
            }
        }
    }

    /// Gives the lease back, so that another can lead at once.
    async fn release_lease(&mut self) {
        self.elector.step_down();
        if let ElectorOutput::Act(ask @ ElectionAction::Resign(_)) = self.elector.poll(now()) {
            self.execute_action(ask).await;
        }
    }

    async fn execute_action(&mut self, ask: ElectionAction) {
        if matches!(ask, ElectionAction::Campaign(_)) {
            self.stop_following().await;
        }
        let sent = now();
        let store = &self.coordinator;
        let asked = async {
            Ok(match &ask {
                ElectionAction::Observe => ElectionResponse::View(store.observe().await?),
                ElectionAction::Campaign(bid) => ElectionResponse::CampaignResult(store.campaign(bid).await?),
                ElectionAction::Renew(tenure) => ElectionResponse::Renewed(store.renew(*tenure).await?),
                ElectionAction::Withdraw(revision, members) => {
                    store.update_in_sync_without_leader(*revision, members).await?;
                    ElectionResponse::Done
                }
                ElectionAction::Resign(tenure) => {
                    store.resign(*tenure).await?;
                    ElectionResponse::Done
                }
            })
        };
        let answer = match timeout(self.options.timings.response_timeout(), asked).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(super::CoordinationError(why))) => Err(why),
            Err(_) => Err("it does not answer in time".to_owned()),
        };
        // Told once, not at every question.
        match &answer {
            Err(why) if !std::mem::replace(&mut self.coordinator_unreachable, true) => {
                tracing::warn!(why, "who leads cannot be asked");
            }
            Ok(_) if std::mem::take(&mut self.coordinator_unreachable) => {
                tracing::info!("who leads can be asked again");
            }
            _ => {}
        }
        self.elector.handle_response(sent, now(), answer.unwrap_or(ElectionResponse::Failed));
    }

    /// Follows the leader that the elector knows.
    async fn follow_leader(&mut self) {
        let Some(leader) = self.elector.leader() else { return };
        let Some(address) = leader.replication.clone() else { return };
        let term = leader.term;
        if self.follow_task.as_ref().is_some_and(|it| it.term == term && !it.task.is_finished()) {
            return;
        }
        let is_news = self.follow_task.as_ref().is_none_or(|it| it.term != term);
        self.stop_following().await;
        let (me, replica) = (self.member.clone(), Arc::clone(&self.replica));
        let how = (self.options.leadership.follower_timeout, self.options.leadership.tls.clone());
        let task = self.supervisor.spawn("following", async move {
            let error = link::follow(address, me, term, replica, how).await;
            // Told once, not at every attempt.
            match is_news {
                true => tracing::info!(%error, term, "does not follow the leader any more; trying again"),
                false => tracing::debug!(%error, term, "still does not follow the leader"),
            }
            sleep(RETRY).await;
        });
        self.follow_task = Some(FollowTask { term, task });
    }

    /// When this returns, nothing more is acknowledged.
    async fn stop_following(&mut self) {
        if let Some(FollowTask { task, .. }) = self.follow_task.take() {
            task.abort();
            let _ = task.await;
        }
    }

    fn publish_state(&self, state: HaState) {
        let role = if state == HaState::Serving { MasterRole::Leader } else { MasterRole::Standby };
        let (leader_address, view_version) = match (self.elector.leading(now()), self.elector.leader()) {
            (Some((tenure, _)), _) => (Some(self.member.address.clone()), Some(tenure.term)),
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
