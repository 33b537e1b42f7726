//! Where requests wait for engines: the scheduler behind a lock, with whom to tell.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use moongate_scheduler::{
    Decision, Event, InstanceIx, Load, Prediction, Refusal, Reported, Request, Scheduler, Ticket,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::ask::Ask;
use super::booked::Booked;
use super::clock::Clock;
use super::decide::{Chosen, Pickiness, Reasons, Wish, choose_passthrough, engines};
use crate::feedback::{Decisions, Metrics};
use crate::fleet::{Endpoint, Fleet, FleetReader};
use crate::prompt::Api;

/// When a client should ask again if there is no room to wait, in seconds.
const CROWDED: f64 = 2.0;

/// The scheduler with what it needs from outside: time, chance, the fleet.
pub(crate) struct Desk {
    state: Mutex<State>,
    /// The time to poll next has changed.
    moved: Notify,
    /// Most requests that wait.
    room: usize,
    fleet: FleetReader,
    metrics: Arc<Metrics>,
    clock: Clock,
}

struct State {
    scheduler: Scheduler,
    /// The fleet that the scheduler knows.
    fleet: Arc<Fleet>,
    /// Which of its engines were sound, and which were due for a trial, at the latest check.
    sound: Vec<(bool, bool)>,
    waiting: HashMap<Ticket, Waiting>,
    decisions: Arc<Decisions>,
    next: u64,
    events: Vec<Event>,
}

/// A request that is held, or about to be told.
struct Waiting {
    tell: oneshot::Sender<Answer>,
    wish: Wish,
    stream: bool,
    id: HeaderValue,
    since: Instant,
}

type Answer = Result<Chosen, Refusal>;
/// An answer and who gets it. It must not be dropped while the desk is locked: it is entered in the books there.
type Told = (Option<oneshot::Sender<Answer>>, Answer);

/// A place at the desk; given up when dropped.
struct Place<'a> {
    desk: &'a Arc<Desk>,
    ticket: Ticket,
    taken: bool,
}

impl Desk {
    /// A desk at which at most `room` requests wait.
    pub(crate) fn new(
        mut scheduler: Scheduler,
        clock: Clock,
        room: usize,
        decisions: Arc<Decisions>,
        fleet: FleetReader,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        scheduler.capture(decisions.are_kept());
        let state = State {
            decisions,
            scheduler,
            fleet: Arc::default(),
            sound: Vec::new(),
            waiting: HashMap::new(),
            next: 0,
            events: Vec::new(),
        };
        Arc::new(Self { state: Mutex::new(state), moved: Notify::new(), room, fleet, metrics, clock })
    }

    /// Waits for a route that avoids the engines in `tried`. Dropping the future gives the place up.
    pub(crate) async fn choose(self: &Arc<Self>, ask: &Ask, tried: &[Arc<Endpoint>]) -> Answer {
        match (&ask.request, ask.api) {
            (Some(request), Api::Chat | Api::Completions | Api::Generate) => {
                let mut refusal = Refusal::UnknownModel;
                for pickiness in Pickiness::ALL {
                    let wish = Wish::new(ask, tried, pickiness);
                    let is_trial = pickiness == Pickiness::Trial;
                    if is_trial && !wish.is_due_for_trial(ask, &self.fleet.current()) {
                        continue;
                    }
                    match self.wait(ask, request, wish).await {
                        Err(_) if is_trial => {}
                        Err(error @ (Refusal::UnknownModel | Refusal::NoneAvailable { .. })) => {
                            refusal = error;
                        }
                        answer => return answer,
                    }
                }
                Err(refusal)
            }
            (request, _) => choose_passthrough(&self.fleet.current(), request.as_ref(), tried),
        }
    }

    async fn wait(self: &Arc<Self>, ask: &Ask, request: &Request, wish: Wish) -> Answer {
        let (tell, mut told) = oneshot::channel();
        let is_trial = wish.is_trial();
        let start = Instant::now();
        let ticket = self.change(|state, now| {
            if state.waiting.len() >= self.room {
                return None;
            }
            let ticket = Ticket(state.next);
            state.next += 1;
            let predicted = ask.predicted.as_ref();
            let prediction =
                predicted.map_or_else(Prediction::default, |predicted| predicted.for_fleet(&state.fleet));
            let barred = wish.barred(&state.fleet);
            state.waiting.insert(
                ticket,
                Waiting { tell, wish, stream: ask.head.stream, id: ask.id.clone(), since: start },
            );
            let ask = moongate_scheduler::Ask { request: request.clone(), prediction, barred };
            state.scheduler.submit(now, ticket, ask);
            Some(ticket)
        });
        let ticket = ticket.ok_or(Refusal::Overloaded { retry_after: CROWDED })?;
        self.metrics.decided(start.elapsed());
        if let Ok(answer) = told.try_recv() {
            return answer;
        }
        if is_trial {
            self.give_up_trial(ticket);
        }
        let mut place = Place { desk: self, ticket, taken: true };
        // The desk tells everyone before it forgets him.
        let answer = told.await.unwrap_or(Err(Refusal::UnknownModel));
        place.taken = false;
        self.metrics.held(start.elapsed());
        answer
    }

    /// A held request waits for sound engines, like the others.
    fn give_up_trial(self: &Arc<Self>, ticket: Ticket) {
        self.change(|state, _| {
            if let Some(waiting) = state.waiting.get_mut(&ticket) {
                waiting.wish.give_up_trial();
                state.scheduler.bar(ticket, waiting.wish.barred(&state.fleet));
            }
        });
    }

    /// The scheduler's seconds as they pass here.
    pub(super) fn real(&self, seconds: f64) -> Duration {
        self.clock.real(seconds)
    }

    /// Whether there is a sound route that avoids the engines in `tried`.
    pub(super) fn has_sound_route(&self, ask: &Ask, tried: &[Arc<Endpoint>]) -> bool {
        let wish = Wish::new(ask, tried, Pickiness::Sound);
        ask.request.as_ref().is_some_and(|request| wish.has_route(&self.fleet.current(), request.model))
    }

    /// The prompt of a sent request is computed.
    pub(super) fn computed(self: &Arc<Self>, ticket: Ticket, cached_tokens: Option<u32>) {
        self.change(|state, now| state.scheduler.first_token(now, ticket, cached_tokens));
    }

    /// A sent request is over.
    pub(super) fn ended(self: &Arc<Self>, ticket: Ticket) {
        self.change(|state, now| state.scheduler.ended(now, ticket));
    }

    /// An engine has told its load.
    pub(crate) fn reported(self: &Arc<Self>, endpoint: &Arc<Endpoint>, load: Reported) {
        self.change(|state, now| {
            let position =
                state.fleet.members.iter().position(|member| Arc::ptr_eq(&member.endpoint, endpoint));
            if let Some(ix) = position.and_then(|at| u32::try_from(at).ok()) {
                state.scheduler.report(now, InstanceIx(ix), load);
            }
        });
    }

    /// The fleet that decisions are made for, with the load of each engine.
    pub(crate) fn loads(self: &Arc<Self>) -> (Arc<Fleet>, Vec<Load>) {
        self.change(|state, now| (state.fleet.clone(), state.scheduler.loads(now).to_vec()))
    }

    /// Requests that are held.
    pub(crate) fn held(&self) -> usize {
        self.state.lock().waiting.len()
    }

    /// Polls the scheduler when it wants to be and when the fleet changes, until `stop`.
    pub(crate) async fn attend(self: Arc<Self>, stop: CancellationToken) {
        let mut generation = self.fleet.subscribe();
        loop {
            let wake_at = self.state.lock().scheduler.wake_at();
            let wake_at = wake_at.and_then(|at| self.clock.when(at));
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.moved.notified() => {}
                () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => self.change(|_, _| ()),
                changed = generation.changed() => match changed {
                    Ok(()) => self.change(|_, _| ()),
                    Err(_) => return,
                },
            }
        }
    }

    /// Changes the scheduler, polls it, and tells those who need not wait any longer.
    fn change<R>(self: &Arc<Self>, change: impl FnOnce(&mut State, f64) -> R) -> R {
        let (result, told, moved) = {
            let mut state = self.state.lock();
            let now = self.clock.now();
            let before = state.scheduler.wake_at();
            state.follow(now, self.fleet.current());
            let result = change(&mut state, now);
            let told = state.poll(now, self);
            (result, told, state.scheduler.wake_at() != before)
        };
        if moved {
            self.moved.notify_one();
        }
        for (tell, answer) in told {
            if let Some(tell) = tell {
                // If nobody waits any more, the entry in the books goes with the answer.
                drop(tell.send(answer));
            }
        }
        result
    }
}

impl State {
    /// Takes changes of the fleet and of its engines' health over.
    fn follow(&mut self, now: f64, fleet: Arc<Fleet>) {
        let changed = !Arc::ptr_eq(&self.fleet, &fleet);
        if changed {
            self.scheduler.set_cluster(now, fleet.cluster.clone());
            self.fleet = fleet;
        }
        let at = Instant::now();
        let sound = self.fleet.members.iter().map(|member| {
            let endpoint = &member.endpoint;
            (endpoint.is_sound(), endpoint.silence.is_trial_due(at))
        });
        if self.waiting.is_empty() || (!changed && sound.clone().eq(self.sound.iter().copied())) {
            return;
        }
        self.sound = sound.collect();
        for (ticket, waiting) in &self.waiting {
            self.scheduler.bar(*ticket, waiting.wish.barred(&self.fleet));
        }
    }

    fn poll(&mut self, now: f64, desk: &Arc<Desk>) -> Vec<Told> {
        self.scheduler.poll(now, fastrand::u64(..), &mut self.events);
        let mut told = Vec::with_capacity(self.events.len());
        // One for each event that sends, in the same order.
        let mut snapshots = self.scheduler.take_captured().collect::<Vec<_>>().into_iter();
        for event in self.events.drain(..) {
            match event {
                Event::Refuse { ticket, refusal } => {
                    told.push((self.waiting.remove(&ticket).map(|waiting| waiting.tell), Err(refusal)));
                }
                Event::Send { ticket, decision } => {
                    let waiting = self.waiting.remove(&ticket);
                    if let (Some((_, snapshot)), Some(waiting)) = (snapshots.next(), &waiting) {
                        let (id, held) = (waiting.id.as_bytes(), waiting.since.elapsed());
                        self.decisions.keep(id, held, decision.clone(), snapshot, &self.fleet);
                    }
                    let answer = chosen(&self.fleet, ticket, decision, desk);
                    match (&answer, &waiting) {
                        // A worker's whole answer tells nothing of its first token. Of a pair, the prefill tells.
                        (Some(Chosen { exit: None, .. }), Some(Waiting { stream: false, .. })) => {
                            self.scheduler.first_token_unseen(ticket);
                        }
                        (None, _) => self.scheduler.ended(now, ticket),
                        _ => {}
                    }
                    told.push((waiting.map(|waiting| waiting.tell), answer.ok_or(Refusal::UnknownModel)));
                }
            }
        }
        told
    }
}

/// `None` if the engines are not in the fleet, which the scheduler knows.
fn chosen(fleet: &Arc<Fleet>, ticket: Ticket, decision: Decision, desk: &Arc<Desk>) -> Option<Chosen> {
    let (entry, exit) = engines(fleet, decision.route)?;
    let decode = exit.as_ref().map(|exit| exit.decode.endpoint.clone());
    let now = Instant::now();
    [Some(&entry.endpoint), decode.as_ref()]
        .into_iter()
        .flatten()
        .for_each(|engine| engine.silence.sent(now));
    let booked = Booked::sent(desk.clone(), ticket, entry.endpoint.clone(), decode);
    let reasons = Reasons { decision: Arc::new(decision), fleet: fleet.clone() };
    Some(Chosen { entry, exit, booked, reasons: Some(reasons) })
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.taken {
            return;
        }
        self.desk.change(|state, now| {
            if state.waiting.remove(&self.ticket).is_some() {
                state.scheduler.ended(now, self.ticket);
            }
        });
    }
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("held", &self.held()).finish_non_exhaustive()
    }
}
