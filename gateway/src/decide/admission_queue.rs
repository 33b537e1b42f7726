//! Admission queue around the scheduler: requests wait here for a route.

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
use super::eligibility::{ChosenRoute, EligibilityTier, RouteConstraints, choose_passthrough, route_members};
use super::in_flight::InFlightGuard;
use crate::feedback::{DecisionHistory, GatewayMetrics};
use crate::fleet::{FleetDecision, FleetReader, FleetSnapshot, UpstreamEndpoint};
use crate::request_body::InferenceApi;
use crate::routed_request::RoutedRequest;

/// `Retry-After` in seconds if the queue is full.
const QUEUE_FULL_RETRY_AFTER: f64 = 2.0;

/// The scheduler with its inputs: clock, randomness and the fleet.
pub(crate) struct AdmissionQueue {
    state: Mutex<AdmissionState>,
    /// Notified when the next poll time has changed.
    wake_time_changed: Notify,
    /// Most queued requests.
    capacity: usize,
    fleet: FleetReader,
    metrics: Arc<GatewayMetrics>,
    clock: SchedulerClock,
}

struct AdmissionState {
    scheduler: Scheduler,
    /// The fleet that the scheduler was last given.
    fleet: Arc<FleetSnapshot>,
    /// Per engine at the latest check: whether it was available, and whether a trial was due.
    availability: Vec<(bool, bool)>,
    waiting: HashMap<AttemptId, AdmissionWaiter>,
    decisions: Arc<DecisionHistory>,
    next_attempt: u64,
    events: Vec<SchedulerEvent>,
}

/// A request that is queued, or about to get its route.
struct AdmissionWaiter {
    sender: oneshot::Sender<RouteResult>,
    constraints: RouteConstraints,
    stream: bool,
    id: HeaderValue,
    queued_at: Instant,
}

type RouteResult = Result<ChosenRoute, ScheduleRejection>;
/// A result with its receiver. It must not be dropped while the queue's state is locked: its in-flight guard locks it on drop.
type RouteDelivery = (Option<oneshot::Sender<RouteResult>>, RouteResult);

/// A slot in the queue; released on drop.
struct QueueSlot<'a> {
    queue: &'a Arc<AdmissionQueue>,
    attempt: AttemptId,
    occupied: bool,
}

impl AdmissionQueue {
    /// A queue of at most `capacity` requests.
    pub(crate) fn new(
        mut scheduler: Scheduler,
        clock: SchedulerClock,
        capacity: usize,
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
            capacity,
            fleet,
            metrics,
            clock,
        })
    }

    /// Waits for a route that avoids the engines in `tried`. Dropping the future leaves the queue.
    pub(crate) async fn choose(
        self: &Arc<Self>,
        routed: &RoutedRequest,
        tried: &[Arc<UpstreamEndpoint>],
    ) -> RouteResult {
        match (&routed.request, routed.api) {
            (Some(request), InferenceApi::Chat | InferenceApi::Completions | InferenceApi::Generate) => {
                let mut rejection = ScheduleRejection::UnknownModel;
                for tier in EligibilityTier::ALL {
                    let constraints = RouteConstraints::new(routed, tried, tier);
                    let is_trial = tier == EligibilityTier::Trial;
                    if is_trial && !constraints.is_due_for_trial(routed, &self.fleet.current()) {
                        continue;
                    }
                    match self.wait(routed, request, constraints).await {
                        Err(_) if is_trial => {}
                        Err(
                            error @ (ScheduleRejection::UnknownModel
                            | ScheduleRejection::NoneAvailable { .. }),
                        ) => {
                            rejection = error;
                        }
                        route_result => return route_result,
                    }
                }
                Err(rejection)
            }
            (request, _) => choose_passthrough(&self.fleet.current(), request.as_ref(), tried),
        }
    }

    async fn wait(
        self: &Arc<Self>,
        routed: &RoutedRequest,
        request: &RequestProfile,
        constraints: RouteConstraints,
    ) -> RouteResult {
        let (sender, mut receiver) = oneshot::channel();
        let is_trial = constraints.is_trial();
        let start = Instant::now();
        let attempt = self.update(|state, now| {
            if state.waiting.len() >= self.capacity {
                return None;
            }
            let attempt = AttemptId(state.next_attempt);
            state.next_attempt += 1;
            let predicted = routed.prompt_prediction.as_ref();
            let prediction = predicted
                .map_or_else(CacheHitPrediction::default, |predicted| predicted.for_fleet(&state.fleet));
            let excluded = constraints.excluded(&state.fleet);
            state.waiting.insert(
                attempt,
                AdmissionWaiter {
                    sender,
                    constraints,
                    stream: routed.routing.stream,
                    id: routed.id.clone(),
                    queued_at: start,
                },
            );
            let schedule_request =
                moongate_scheduler::ScheduleRequest { request: request.clone(), prediction, excluded };
            state.scheduler.submit(now, attempt, schedule_request);
            Some(attempt)
        });
        let attempt = attempt.ok_or(ScheduleRejection::Overloaded { retry_after: QUEUE_FULL_RETRY_AFTER })?;
        self.metrics.record_decision(start.elapsed());
        if let Ok(route_result) = receiver.try_recv() {
            return route_result;
        }
        if is_trial {
            self.cancel_trial(attempt);
        }
        let mut slot = QueueSlot { queue: self, attempt, occupied: true };
        // A sender is dropped only after it has sent a result.
        let route_result = receiver.await.unwrap_or(Err(ScheduleRejection::UnknownModel));
        slot.occupied = false;
        self.metrics.record_queue_wait(start.elapsed());
        route_result
    }

    /// A queued request waits for available engines, not for the trial.
    fn cancel_trial(self: &Arc<Self>, attempt: AttemptId) {
        self.update(|state, _| {
            if let Some(waiting) = state.waiting.get_mut(&attempt) {
                waiting.constraints.cancel_trial();
                state.scheduler.exclude(attempt, waiting.constraints.excluded(&state.fleet));
            }
        });
    }

    /// Converts the scheduler's seconds to wall-clock time.
    pub(crate) fn to_wall_time(&self, seconds: f64) -> Duration {
        self.clock.to_wall_time(seconds)
    }

    /// Whether there is an available route that avoids the engines in `tried`.
    pub(crate) fn has_available_route(
        &self,
        routed: &RoutedRequest,
        tried: &[Arc<UpstreamEndpoint>],
    ) -> bool {
        let constraints = RouteConstraints::new(routed, tried, EligibilityTier::Available);
        routed
            .request
            .as_ref()
            .is_some_and(|request| constraints.has_route(&self.fleet.current(), request.model))
    }

    /// The prompt of a sent request has been computed.
    pub(super) fn record_prompt_computed(self: &Arc<Self>, attempt: AttemptId, cached_tokens: Option<u32>) {
        self.update(|state, now| state.scheduler.first_token(now, attempt, cached_tokens));
    }

    /// A sent request has ended. `output_tokens` is the length of a complete response.
    pub(super) fn record_ended(self: &Arc<Self>, attempt: AttemptId, output_tokens: Option<u64>) {
        self.update(|state, now| {
            if let Some(output_tokens) = output_tokens {
                state.scheduler.response_complete(now, attempt, output_tokens);
            }
            state.scheduler.ended(now, attempt);
        });
    }

    /// An engine has reported its load.
    pub(crate) fn record_load(self: &Arc<Self>, endpoint: &Arc<UpstreamEndpoint>, load: ReportedLoad) {
        self.update(|state, now| {
            let mut engines = InstanceIndex::all().zip(&state.fleet.members);
            let reported = engines.find(|(_, member)| Arc::ptr_eq(&member.endpoint, endpoint));
            if let Some((ix, _)) = reported {
                state.scheduler.report(now, ix, load);
            }
        });
    }

    /// The scheduler's fleet, with the load of each engine.
    pub(crate) fn loads(self: &Arc<Self>) -> (Arc<FleetSnapshot>, Vec<InstanceLoad>) {
        self.update(|state, now| (state.fleet.clone(), state.scheduler.loads(now).to_vec()))
    }

    pub(crate) fn queued(&self) -> usize {
        self.state.lock().waiting.len()
    }

    /// Polls the scheduler at its poll times and when the fleet changes, until `stop`.
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

    /// Changes the scheduler, polls it, and delivers results to waiting requests.
    fn update<R>(self: &Arc<Self>, change: impl FnOnce(&mut AdmissionState, f64) -> R) -> R {
        let (result, deliveries, moved) = {
            let mut state = self.state.lock();
            let now = self.clock.now();
            let before = state.scheduler.next_poll_at();
            state.sync_fleet(now, self.fleet.current());
            let result = change(&mut state, now);
            let deliveries = state.poll(now, self);
            (result, deliveries, state.scheduler.next_poll_at() != before)
        };
        if moved {
            self.wake_time_changed.notify_one();
        }
        for (sender, route_result) in deliveries {
            if let Some(sender) = sender {
                // If the receiver is gone, dropping the result also releases its in-flight guard.
                drop(sender.send(route_result));
            }
        }
        result
    }
}

impl AdmissionState {
    /// Applies changes of the fleet and of engine availability to the scheduler.
    fn sync_fleet(&mut self, now: f64, fleet: Arc<FleetSnapshot>) {
        let changed = !Arc::ptr_eq(&self.fleet, &fleet);
        if changed {
            self.scheduler.set_cluster(now, fleet.cluster.clone());
            self.fleet = fleet;
        }
        let instant = Instant::now();
        let availability = self.fleet.members.iter().map(|member| {
            let endpoint = &member.endpoint;
            (endpoint.is_available(), endpoint.silence.is_trial_due(instant))
        });
        if self.waiting.is_empty() || (!changed && availability.clone().eq(self.availability.iter().copied()))
        {
            return;
        }
        self.availability = availability.collect();
        for (attempt, waiting) in &self.waiting {
            self.scheduler.exclude(*attempt, waiting.constraints.excluded(&self.fleet));
        }
    }

    fn poll(&mut self, now: f64, queue: &Arc<AdmissionQueue>) -> Vec<RouteDelivery> {
        self.scheduler.poll(now, fastrand::u64(..), &mut self.events);
        let mut deliveries = Vec::with_capacity(self.events.len());
        // One snapshot for each `Send` event, in the same order.
        let mut snapshots = self.scheduler.take_captured().collect::<Vec<_>>().into_iter();
        for event in self.events.drain(..) {
            match event {
                SchedulerEvent::Reject { attempt: rejected, rejection } => {
                    deliveries
                        .push((self.waiting.remove(&rejected).map(|waiting| waiting.sender), Err(rejection)));
                }
                SchedulerEvent::Send { attempt, decision } => {
                    let waiting = self.waiting.remove(&attempt);
                    if let (Some((_, snapshot)), Some(waiting)) = (snapshots.next(), &waiting) {
                        let (id, queued) = (waiting.id.as_bytes(), waiting.queued_at.elapsed());
                        self.decisions.push(id, queued, decision.clone(), snapshot, &self.fleet);
                    }
                    let route = build_route(&self.fleet, attempt, decision, queue);
                    match (&route, &waiting) {
                        // A worker's non-streamed response does not reveal its first token. Of a pair, the end of the prefill does.
                        (
                            Some(ChosenRoute { decode: None, .. }),
                            Some(AdmissionWaiter { stream: false, .. }),
                        ) => {
                            self.scheduler.first_token_unobserved(attempt);
                        }
                        (None, _) => self.scheduler.ended(now, attempt),
                        _ => {}
                    }
                    deliveries.push((
                        waiting.map(|waiting| waiting.sender),
                        route.ok_or(ScheduleRejection::UnknownModel),
                    ));
                }
            }
        }
        deliveries
    }
}

/// `None` if an engine of the route is no longer in the fleet.
fn build_route(
    fleet: &Arc<FleetSnapshot>,
    attempt: AttemptId,
    decision: RoutingDecision,
    queue: &Arc<AdmissionQueue>,
) -> Option<ChosenRoute> {
    let (prefill, target) = route_members(fleet, decision.route)?;
    let decode = target.as_ref().map(|target| target.decode.endpoint.clone());
    let now = Instant::now();
    [Some(&prefill.endpoint), decode.as_ref()]
        .into_iter()
        .flatten()
        .for_each(|engine| engine.silence.record_sent(now));
    let in_flight = InFlightGuard::routed(queue.clone(), attempt, prefill.endpoint.clone(), decode);
    let reasons = FleetDecision { decision: Arc::new(decision), fleet: fleet.clone() };
    Some(ChosenRoute { prefill, decode: target, in_flight, decision: Some(reasons) })
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
        f.debug_struct("AdmissionQueue").field("queued", &self.queued()).finish_non_exhaustive()
    }
}
