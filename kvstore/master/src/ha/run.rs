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

use super::coordinator::{Coordinator, Tenure};
use super::disk::Disk;
use super::elector::{Answer, Ask, Due, Elector, Times};
use super::fence::{Fence, now};
use super::link;
use super::member::Member;
use super::replica::Replica;
use super::standby_journal::StandbyJournal;
use super::tenure::{Leading, Lists, NotLed, TenureOptions};
use crate::faces::{Faces, FacesOptions};
use crate::server::{HaState, Role, Server, Standing};
use crate::state::State;

/// Pause before a leader that could not be followed is tried again.
const RETRY: Duration = Duration::from_millis(100);
/// Time for requests to the administration when this master begins to lead.
const ADMIN_END: Duration = Duration::from_millis(100);

/// How a master takes part.
#[derive(Clone, Debug)]
pub struct HaOptions {
    /// Where clients reach this master when it leads. No other has the same.
    pub address: String,
    /// Where followers reach it then.
    pub replication_address: String,
    /// Times of elections.
    pub times: Times,
    /// Whether it may lead once although others may know more.
    pub force: bool,
    /// What it leads with.
    pub tenure: TenureOptions,
}

/// What others may know of a master among others.
#[derive(Debug)]
pub struct Shown {
    /// Its part.
    pub standing: ArcSwap<Standing>,
    /// What it serves with now.
    pub server: Mutex<Option<Arc<Server>>>,
    /// Whether it leads and serves.
    pub serves: watch::Sender<bool>,
}

impl Shown {
    /// A master that has just been started.
    pub fn new() -> Self {
        Self {
            standing: ArcSwap::from_pointee(Standing::starting()),
            server: Mutex::new(None),
            serves: watch::Sender::new(false),
        }
    }
}

impl Default for Shown {
    fn default() -> Self {
        Self::new()
    }
}

/// A master among others.
pub struct Participant {
    options: HaOptions,
    coordinator: Arc<dyn Coordinator>,
    elector: Elector,
    me: Member,
    fence: Arc<Fence>,
    replica: Arc<Mutex<Replica>>,
    shown: Arc<Shown>,
    supervisor: Supervisor,
    stop: CancellationToken,
    /// Where blocking is allowed.
    main: Handle,
    following: Option<Following>,
    /// What serves the administration while standing by.
    standby: Option<Supervisor>,
    /// Whether the store did not answer the last question.
    unanswered: bool,
}

/// A leader that is followed.
struct Following {
    term: i64,
    task: JoinHandle<()>,
}

impl Participant {
    /// A master with an empty state, or with one from a disk. Its tasks belong to `supervisor`; its ticks run on `main`, where they may
    /// wait for followers.
    pub fn new(
        options: HaOptions,
        disk: Option<(Disk, State)>,
        coordinator: Arc<dyn Coordinator>,
        shown: Arc<Shown>,
        supervisor: Supervisor,
        main: Handle,
    ) -> Self {
        let settings = options.tenure.server.core.clone();
        let (me, replica) = match disk {
            Some((disk, state)) => {
                let me = Member::known(options.address.clone(), disk.incarnation());
                (me, Replica::on_disk(settings, disk, state))
            }
            None => (Member::new(options.address.clone()), Replica::new(settings)),
        };
        let elector =
            Elector::new(me.clone(), options.replication_address.clone(), options.times, options.force);
        let replica = Arc::new(Mutex::new(replica));
        Self {
            coordinator,
            elector,
            me,
            fence: Arc::default(),
            replica,
            shown,
            stop: supervisor.token(),
            supervisor,
            main,
            following: None,
            standby: None,
            unanswered: false,
            options,
        }
    }

    /// Takes part until the supervisor's shutdown.
    pub async fn run(mut self) {
        while !self.stop.is_cancelled() {
            let Some(tenure) = self.stand_by().await else { break };
            self.unfollow().await;
            self.lead(tenure).await;
        }
        self.unfollow().await;
        self.replica.lock().close();
        self.show(HaState::Stopping);
        self.close_standby().await;
    }

    /// Follows whoever leads, until this master does. Nothing if it is stopped.
    async fn stand_by(&mut self) -> Option<Tenure> {
        loop {
            if let Some((tenure, _)) = self.elector.leading(now()) {
                return Some(tenure);
            }
            self.open_standby().await;
            self.show(HaState::Standby);
            self.attend().await;
            match self.elector.due(now()) {
                Due::Ask(ask) => self.ask(ask).await,
                Due::Wait(until) => {
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
    async fn lead(&mut self, tenure: Tenure) {
        let begun = now();
        self.close_standby().await;
        let (state, durable) = self.replica.lock().take();
        let led = self.options.tenure.prepare(state, durable, &self.fence);
        let store =
            Lists { coordinator: Arc::clone(&self.coordinator), patience: self.options.times.patience() };
        let process = (&self.main, &self.supervisor);
        let begin = Leading::begin(&self.options.tenure, led, &self.me, (tenure, store), process);
        let state = match begin.await {
            Ok(leading) => {
                let (rpc, keys) = (leading.rpc.address(), leading.server.master.key_count());
                tracing::info!(term = tenure.term, %rpc, keys, took = ?(now() - begun), "leads");
                *self.shown.server.lock() = Some(Arc::clone(&leading.server));
                self.show(HaState::Serving);
                self.hold(tenure, &leading.deposed).await;
                self.fence.lower();
                tracing::warn!(term = tenure.term, "leads no more");
                self.show(HaState::Standby);
                *self.shown.server.lock() = None;
                // Nobody is answered any more, so another may begin while this tenure is ended.
                self.give_back().await;
                leading.end().await
            }
            Err(NotLed { why, state }) => {
                tracing::error!(why, "cannot lead");
                sleep(self.options.times.lease).await;
                self.give_back().await;
                state
            }
        };
        self.replica.lock().put(state);
    }

    /// Serves the administration of a master that stands by: it has an empty state and answers nothing about data.
    async fn open_standby(&mut self) {
        if self.standby.is_some() {
            return;
        }
        let options = &self.options.tenure;
        let faces = FacesOptions { metadata: None, events: None, quotas: None, ..options.faces.clone() };
        let journal = Arc::new(StandbyJournal(Arc::clone(&self.replica)));
        let (server, supervisor) = (Server::new(options.server.clone(), journal), self.supervisor.child());
        let server = Arc::new(server);
        if let Err(error) = Faces::new(faces).start(&server, &supervisor).await {
            tracing::error!(%error, "the administration cannot be served while standing by");
        }
        *self.shown.server.lock() = Some(server);
        self.standby = Some(supervisor);
    }

    async fn close_standby(&mut self) {
        *self.shown.server.lock() = None;
        if let Some(supervisor) = self.standby.take() {
            let _ = supervisor.shutdown(ADMIN_END).await;
        }
    }

    /// Renews the lease, until that ends or this master is stopped or deposed.
    async fn hold(&mut self, tenure: Tenure, deposed: &CancellationToken) {
        let (stop, deposed) = (self.stop.clone(), deposed.clone());
        loop {
            match self.elector.leading(now()) {
                Some((it, until)) if it == tenure => self.fence.set(until),
                _ => return,
            }
            let due = self.elector.due(now());
            tokio::select! {
                () = stop.cancelled() => return,
                () = deposed.cancelled() => return self.elector.deposed(),
                () = async {
                    match due {
                        Due::Ask(ask) => self.ask(ask).await,
                        Due::Wait(until) => sleep(until.saturating_sub(now())).await,
                    }
                } => {}
            }
        }
    }

    /// Gives the lease back, so that another can lead at once.
    async fn give_back(&mut self) {
        self.elector.step_down();
        if let Due::Ask(ask @ Ask::Resign(_)) = self.elector.due(now()) {
            self.ask(ask).await;
        }
    }

    async fn ask(&mut self, ask: Ask) {
        if matches!(ask, Ask::Campaign(_)) {
            self.unfollow().await;
        }
        let sent = now();
        let store = &self.coordinator;
        let asked = async {
            Ok(match &ask {
                Ask::Observe => Answer::View(store.observe().await?),
                Ask::Campaign(bid) => Answer::Won(store.campaign(bid).await?),
                Ask::Renew(tenure) => Answer::Renewed(store.renew(*tenure).await?),
                Ask::Withdraw(revision, members) => {
                    store.withdraw(*revision, members).await?;
                    Answer::Done
                }
                Ask::Resign(tenure) => {
                    store.resign(*tenure).await?;
                    Answer::Done
                }
            })
        };
        let answer = match timeout(self.options.times.patience(), asked).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(super::CoordinationError(why))) => Err(why),
            Err(_) => Err("it does not answer in time".to_owned()),
        };
        // Told once, not at every question.
        match &answer {
            Err(why) if !std::mem::replace(&mut self.unanswered, true) => {
                tracing::warn!(why, "who leads cannot be asked");
            }
            Ok(_) if std::mem::take(&mut self.unanswered) => tracing::info!("who leads can be asked again"),
            _ => {}
        }
        self.elector.answered(sent, now(), answer.unwrap_or(Answer::Failed));
    }

    /// Follows the leader that the elector knows.
    async fn attend(&mut self) {
        let Some(leader) = self.elector.leader() else { return };
        let Some(address) = leader.replication.clone() else { return };
        let term = leader.term;
        if self.following.as_ref().is_some_and(|it| it.term == term && !it.task.is_finished()) {
            return;
        }
        let is_news = self.following.as_ref().is_none_or(|it| it.term != term);
        self.unfollow().await;
        let (me, replica) = (self.me.clone(), Arc::clone(&self.replica));
        let how = (self.options.tenure.patience, self.options.tenure.tls.clone());
        let task = self.supervisor.spawn("following", async move {
            let error = link::follow(address, me, term, replica, how).await;
            // Told once, not at every attempt.
            match is_news {
                true => tracing::info!(%error, term, "does not follow the leader any more; trying again"),
                false => tracing::debug!(%error, term, "still does not follow the leader"),
            }
            sleep(RETRY).await;
        });
        self.following = Some(Following { term, task });
    }

    /// When this returns, nothing more is acknowledged.
    async fn unfollow(&mut self) {
        if let Some(Following { task, .. }) = self.following.take() {
            task.abort();
            let _ = task.await;
        }
    }

    fn show(&self, state: HaState) {
        let role = if state == HaState::Serving { Role::Leader } else { Role::Standby };
        let (leader_address, view_version) = match (self.elector.leading(now()), self.elector.leader()) {
            (Some((tenure, _)), _) => (Some(self.me.address.clone()), Some(tenure.term)),
            (None, Some(leader)) => (Some(leader.address.clone()), Some(leader.term)),
            (None, None) => (None, None),
        };
        self.shown.serves.send_replace(state == HaState::Serving);
        self.shown.standing.store(Arc::new(Standing { role, state, leader_address, view_version }));
        if let Some(server) = &*self.shown.server.lock() {
            server.standing.store(self.shown.standing.load_full());
        }
    }
}
