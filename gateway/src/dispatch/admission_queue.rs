//! Where requests wait for engines: the scheduler behind a lock, with whom to tell.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use moongate_scheduler::{
    AttemptId, CacheHitPrediction, InstanceIndex, InstanceLoad, ReportedLoad, RequestProfile,
    RoutingDecision, ScheduleRejection, Scheduler, SchedulerEvent,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::clock::SchedulerClock;
use super::eligibility::{
    ChosenRoute, EligibilityTier, FleetDecision, RouteConstraints, choose_passthrough, route_members,
};
use super::in_flight::InFlightGuard;
use super::routed_request::RoutedRequest;
use crate::feedback::{DecisionHistory, GatewayMetrics};
use crate::fleet::{FleetReader, FleetSnapshot, UpstreamEndpoint};
use crate::request_body::InferenceApi;

/// When a client should ask again if there is no room to wait, in seconds.
const QUEUE_FULL_RETRY_AFTER: f64 = 2.0;

/// The scheduler with what it needs from outside: time, chance, the fleet.
pub(crate) struct AdmissionQueue {
    state: Mutex<AdmissionState>,
    /// The time to poll next has changed.
    wake_time_changed: Notify,
    /// Most requests that wait.
    capacity: usize,
    fleet: FleetReader,
    metrics: Arc<GatewayMetrics>,
    clock: SchedulerClock,
}

struct AdmissionState {
    scheduler: Scheduler,
    /// The fleet that the scheduler knows.
    fleet: Arc<FleetSnapshot>,
    /// Which of its engines were sound, and which were due for a trial, at the latest check.
    availability: Vec<(bool, bool)>,
    waiting: HashMap<AttemptId, AdmissionWaiter>,
    decisions: Arc<DecisionHistory>,
    next_attempt: u64,
    events: Vec<SchedulerEvent>,
}

/// A request that is held, or about to be told.
struct AdmissionWaiter {
    sender: oneshot::Sender<RouteResult>,
    constraints: RouteConstraints,
    stream: bool,
    id: HeaderValue,
    queued_at: Instant,
}

type RouteResult = Result<ChosenRoute, ScheduleRejection>;
/// An answer and who gets it. It must not be dropped while the desk is locked: it is entered in the books there.
type RouteDelivery = (Option<oneshot::Sender<RouteResult>>, RouteResult);

/// A place at the desk; given up when dropped.
struct QueueSlot<'a> {
    queue: &'a Arc<AdmissionQueue>,
    attempt: AttemptId,
    occupied: bool,
}

impl AdmissionQueue {
    /// A desk at which at most `room` requests wait.
    pub(crate) fn new(
        mut scheduler: Scheduler,
        clock: SchedulerClock,
        room: usize,
        decisions: Arc<DecisionHistory>,
        fleet: FleetReader,
        metrics: Arc<GatewayMetrics>,
    ) -> Arc<Self> {
        scheduler.set_capture(decisions.is_enabled());
        let state = AdmissionState {
            decisions,
            scheduler,
            fleet: Arc::default(),
            availability: Vec::new(),
            waiting: HashMap::new(),
            next_attempt: 0,
            events: Vec::new(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            wake_time_changed: Notify::new(),
            capacity: room,
            fleet,
            metrics,
            clock,
        })
    }

    /// Waits for a route that avoids the engines in `tried`. Dropping the future gives the place up.
    pub(crate) async fn choose(
        self: &Arc<Self>,
        ask: &RoutedRequest,
        tried: &[Arc<UpstreamEndpoint>],
    ) -> RouteResult {
        match (&ask.request, ask.api) {
            (Some(request), InferenceApi::Chat | InferenceApi::Completions | InferenceApi::Generate) => {
                let mut refusal = ScheduleRejection::UnknownModel;
                for pickiness in EligibilityTier::ALL {
                    let wish = RouteConstraints::new(ask, tried, pickiness);
                    let is_trial = pickiness == EligibilityTier::Trial;
                    if is_trial && !wish.is_due_for_trial(ask, &self.fleet.current()) {
                        continue;
                    }
                    match self.wait(ask, request, wish).await {
                        Err(_) if is_trial => {}
                        Err(
                            error @ (ScheduleRejection::UnknownModel
                            | ScheduleRejection::NoneAvailable { .. }),
                        ) => {
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

    async fn wait(
        self: &Arc<Self>,
        ask: &RoutedRequest,
        request: &RequestProfile,
        wish: RouteConstraints,
    ) -> RouteResult {
        let (tell, mut told) = oneshot::channel();
        let is_trial = wish.is_trial();
        let start = Instant::now();
        let ticket = self.update(|state, now| {
            if state.waiting.len() >= self.capacity {
                return None;
            }
            let ticket = AttemptId(state.next_attempt);
            state.next_attempt += 1;
            let predicted = ask.prompt_prediction.as_ref();
            let prediction = predicted
                .map_or_else(CacheHitPrediction::default, |predicted| predicted.for_fleet(&state.fleet));
            let barred = wish.excluded(&state.fleet);
            state.waiting.insert(
                ticket,
                AdmissionWaiter {
                    sender: tell,
                    constraints: wish,
                    stream: ask.routing.stream,
                    id: ask.id.clone(),
                    queued_at: start,
                },
            );
            let ask = moongate_scheduler::ScheduleRequest {
                request: request.clone(),
                prediction,
                excluded: barred,
            };
            state.scheduler.submit(now, ticket, ask);
            Some(ticket)
        });
        let ticket = ticket.ok_or(ScheduleRejection::Overloaded { retry_after: QUEUE_FULL_RETRY_AFTER })?;
        self.metrics.record_decision(start.elapsed());
        if let Ok(answer) = told.try_recv() {
            return answer;
        }
        if is_trial {
            self.cancel_trial(ticket);
        }
        let mut place = QueueSlot { queue: self, attempt: ticket, occupied: true };
        // The desk tells everyone before it forgets him.
        let answer = told.await.unwrap_or(Err(ScheduleRejection::UnknownModel));
        place.occupied = false;
        self.metrics.record_queue_wait(start.elapsed());
        answer
    }

    /// A held request waits for sound engines, like the others.
    fn cancel_trial(self: &Arc<Self>, ticket: AttemptId) {
        self.update(|state, _| {
            if let Some(waiting) = state.waiting.get_mut(&ticket) {
                waiting.constraints.cancel_trial();
                state.scheduler.exclude(ticket, waiting.constraints.excluded(&state.fleet));
            }
        });
    }

    /// The scheduler's seconds as they pass here.
    pub(super) fn to_wall_time(&self, seconds: f64) -> Duration {
        self.clock.to_wall_time(seconds)
    }

    /// Whether there is a sound route that avoids the engines in `tried`.
    pub(super) fn has_available_route(&self, ask: &RoutedRequest, tried: &[Arc<UpstreamEndpoint>]) -> bool {
        let wish = RouteConstraints::new(ask, tried, EligibilityTier::Available);
        ask.request.as_ref().is_some_and(|request| wish.has_route(&self.fleet.current(), request.model))
    }

    /// The prompt of a sent request is computed.
    pub(super) fn record_prompt_computed(self: &Arc<Self>, ticket: AttemptId, cached_tokens: Option<u32>) {
        self.update(|state, now| state.scheduler.first_token(now, ticket, cached_tokens));
    }

    /// A sent request is over.
    pub(super) fn record_ended(self: &Arc<Self>, ticket: AttemptId) {
        self.update(|state, now| state.scheduler.ended(now, ticket));
    }

    /// An engine has told its load.
    pub(crate) fn record_load(self: &Arc<Self>, endpoint: &Arc<UpstreamEndpoint>, load: ReportedLoad) {
        self.update(|state, now| {
            let position =
                state.fleet.members.iter().position(|member| Arc::ptr_eq(&member.endpoint, endpoint));
            if let Some(ix) = position.and_then(|at| u32::try_from(at).ok()) {
                state.scheduler.report(now, InstanceIndex(ix), load);
            }
        });
    }

    /// The fleet that decisions are made for, with the load of each engine.
    pub(crate) fn loads(self: &Arc<Self>) -> (Arc<FleetSnapshot>, Vec<InstanceLoad>) {
        self.update(|state, now| (state.fleet.clone(), state.scheduler.loads(now).to_vec()))
    }

    /// Requests that are held.
    pub(crate) fn queued(&self) -> usize {
        self.state.lock().waiting.len()
    }

    /// Polls the scheduler when it wants to be and when the fleet changes, until `stop`.
    pub(crate) async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut generation = self.fleet.subscribe();
        loop {
            let wake_at = self.state.lock().scheduler.next_poll_at();
            let wake_at = wake_at.and_then(|at| self.clock.instant_at(at));
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.wake_time_changed.notified() => {}
                () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => self.update(|_, _| ()),
                changed = generation.changed() => match changed {
                    Ok(()) => self.update(|_, _| ()),
                    Err(_) => return,
                },
            }
        }
    }

    /// Changes the scheduler, polls it, and tells those who need not wait any longer.
    fn update<R>(self: &Arc<Self>, change: impl FnOnce(&mut AdmissionState, f64) -> R) -> R {
        let (result, told, moved) = {
            let mut state = self.state.lock();
            let now = self.clock.now();
            let before = state.scheduler.next_poll_at();
            state.sync_fleet(now, self.fleet.current());
            let result = change(&mut state, now);
            let told = state.poll(now, self);
            (result, told, state.scheduler.next_poll_at() != before)
        };
        if moved {
            self.wake_time_changed.notify_one();
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

impl AdmissionState {
    /// Takes changes of the fleet and of its engines' health over.
    fn sync_fleet(&mut self, now: f64, fleet: Arc<FleetSnapshot>) {
        let changed = !Arc::ptr_eq(&self.fleet, &fleet);
        if changed {
            self.scheduler.set_cluster(now, fleet.cluster.clone());
            self.fleet = fleet;
        }
        let at = Instant::now();
        let sound = self.fleet.members.iter().map(|member| {
            let endpoint = &member.endpoint;
            (endpoint.is_available(), endpoint.silence.is_trial_due(at))
        });
        if self.waiting.is_empty() || (!changed && sound.clone().eq(self.availability.iter().copied())) {
            return;
        }
        self.availability = sound.collect();
        for (ticket, waiting) in &self.waiting {
            self.scheduler.exclude(*ticket, waiting.constraints.excluded(&self.fleet));
        }
    }

    fn poll(&mut self, now: f64, desk: &Arc<AdmissionQueue>) -> Vec<RouteDelivery> {
        self.scheduler.poll(now, fastrand::u64(..), &mut self.events);
        let mut told = Vec::with_capacity(self.events.len());
        // One for each event that sends, in the same order.
        let mut snapshots = self.scheduler.take_captured().collect::<Vec<_>>().into_iter();
        for event in self.events.drain(..) {
            match event {
                SchedulerEvent::Reject { ticket, rejection: refusal } => {
                    told.push((self.waiting.remove(&ticket).map(|waiting| waiting.sender), Err(refusal)));
                }
                SchedulerEvent::Send { attempt: ticket, decision } => {
                    let waiting = self.waiting.remove(&ticket);
                    if let (Some((_, snapshot)), Some(waiting)) = (snapshots.next(), &waiting) {
                        let (id, held) = (waiting.id.as_bytes(), waiting.queued_at.elapsed());
                        self.decisions.push(id, held, decision.clone(), snapshot, &self.fleet);
                    }
                    let answer = chosen(&self.fleet, ticket, decision, desk);
                    match (&answer, &waiting) {
                        // A worker's whole answer tells nothing of its first token. Of a pair, the prefill tells.
                        (
                            Some(ChosenRoute { decode: None, .. }),
                            Some(AdmissionWaiter { stream: false, .. }),
                        ) => {
                            self.scheduler.first_token_unobserved(ticket);
                        }
                        (None, _) => self.scheduler.ended(now, ticket),
                        _ => {}
                    }
                    told.push((
                        waiting.map(|waiting| waiting.sender),
                        answer.ok_or(ScheduleRejection::UnknownModel),
                    ));
                }
            }
        }
        told
    }
}

/// `None` if the engines are not in the fleet, which the scheduler knows.
fn chosen(
    fleet: &Arc<FleetSnapshot>,
    ticket: AttemptId,
    decision: RoutingDecision,
    desk: &Arc<AdmissionQueue>,
) -> Option<ChosenRoute> {
    let (entry, exit) = route_members(fleet, decision.route)?;
    let decode = exit.as_ref().map(|exit| exit.decode.endpoint.clone());
    let now = Instant::now();
    [Some(&entry.endpoint), decode.as_ref()]
        .into_iter()
        .flatten()
        .for_each(|engine| engine.silence.record_sent(now));
    let booked = InFlightGuard::routed(desk.clone(), ticket, entry.endpoint.clone(), decode);
    let reasons = FleetDecision { decision: Arc::new(decision), fleet: fleet.clone() };
    Some(ChosenRoute { prefill: entry, decode: exit, in_flight: booked, decision: Some(reasons) })
}

impl Drop for QueueSlot<'_> {
    fn drop(&mut self) {
        if !self.occupied {
            return;
        }
        self.queue.update(|state, now| {
            if state.waiting.remove(&self.attempt).is_some() {
                state.scheduler.ended(now, self.attempt);
            }
        });
    }
}

impl fmt::Debug for AdmissionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("held", &self.queued()).finish_non_exhaustive()
    }
}
