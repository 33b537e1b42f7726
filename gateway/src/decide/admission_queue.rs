//! Admission queue around the scheduler: requests wait here for a route.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::RankLoads;
use moongate_scheduler::{
    AttemptId, InstanceIndex, InstanceLoad, ModelIndex, PolicyName, ReportedLoad, RequestProfile,
    ScheduleRejection, ScheduleRequest, Scheduler,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::admission_state::{
    AdmissionState, AdmissionWaiter, DecisionRecipient, FollowerLink, LeaderLink, RouteResult,
};
use super::clock::SchedulerClock;
use super::eligibility::{EligibilityTier, RouteConstraints, can_continue_response, choose_passthrough};
use super::shared_queue::{LeaderMessage, QueueTicket, TicketMessage};
use super::unscheduled::unscheduled_requests;
use crate::feedback::{DecisionHistory, GatewayMetrics};
use crate::fleet::{FleetReader, FleetSnapshot, UpstreamEndpoint};
use crate::request_body::InferenceApi;
use crate::routed_request::RoutedRequest;

/// `Retry-After` in seconds if the queue is full.
pub(super) const QUEUE_FULL_RETRY_AFTER: f64 = 2.0;

/// The scheduler with its inputs: clock, randomness and the fleet.
pub(crate) struct AdmissionQueue {
    state: Mutex<AdmissionState>,
    /// Notified when the next poll time has changed.
    wake_time_changed: Notify,
    /// Most queued requests.
    capacity: usize,
    policy: PolicyName,
    fleet: FleetReader,
    metrics: Arc<GatewayMetrics>,
    clock: SchedulerClock,
}

/// Settings of an admission queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdmissionOptions {
    /// Most queued requests.
    pub(crate) capacity: usize,
    pub(crate) policy: PolicyName,
    /// Whether other gateways can decide, or get decisions.
    pub(crate) is_shared: bool,
}

/// A slot in the queue; released on drop.
struct QueueSlot<'a> {
    queue: &'a Arc<AdmissionQueue>,
    attempt: AttemptId,
    occupied: bool,
}

impl AdmissionQueue {
    /// An empty queue around `scheduler`.
    pub(crate) fn new(
        mut scheduler: Scheduler,
        clock: SchedulerClock,
        options: AdmissionOptions,
        decisions: Arc<DecisionHistory>,
        fleet: FleetReader,
        metrics: Arc<GatewayMetrics>,
    ) -> Arc<Self> {
        scheduler.set_capture(decisions.is_enabled());
        let state =
            AdmissionState::new(scheduler, decisions, options.is_shared, metrics.shared_queue.clone());
        Arc::new(Self {
            state: Mutex::new(state),
            wake_time_changed: Notify::new(),
            capacity: options.capacity,
            policy: options.policy,
            fleet,
            metrics,
            clock,
        })
    }

    pub(super) fn policy(&self) -> PolicyName {
        self.policy
    }

    /// Waits for a route that avoids the engines in `tried`. Dropping the future leaves the queue.
    pub(crate) async fn choose(
        self: &Arc<Self>,
        routed: &RoutedRequest,
        tried: &[Arc<UpstreamEndpoint>],
    ) -> RouteResult {
        match (&routed.request, routed.api) {
            (Some(request), api) if api != InferenceApi::Other => {
                if !can_continue_response(&self.fleet.current(), request.model, routed) {
                    return Err(ScheduleRejection::NoneAvailable { prefills: 0, decodes: 0 });
                }
                let mut rejection = ScheduleRejection::UnknownModel;
                for tier in EligibilityTier::ALL {
                    let constraints = RouteConstraints::new(routed, tried, tier, &self.fleet.current());
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
            (request, _) => choose_passthrough(&self.fleet.current(), request.as_ref(), routed, tried),
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
            let of_session = || {
                let route = routed.session_route.as_ref()?;
                Some(route.hits(&state.fleet, request.input_tokens))
            };
            let prediction = match &routed.prompt_prediction {
                Some(predicted) => predicted.for_fleet(&state.fleet),
                None => of_session().unwrap_or_default(),
            };
            let excluded = constraints.excluded(&state.fleet);
            let waiter = AdmissionWaiter {
                recipient: DecisionRecipient::Request { sender, constraints },
                stream: routed.routing.stream,
                id: routed.id.clone(),
                alias: routed.alias.as_ref().map(|alias| alias.name.clone()),
                queued_at: start,
                arrived: now,
                submission: None,
            };
            let submission = ScheduleRequest { request: request.clone(), prediction, excluded };
            Some(state.enqueue(now, waiter, submission))
        });
        let attempt = attempt.ok_or(ScheduleRejection::Overloaded { retry_after: QUEUE_FULL_RETRY_AFTER })?;
        self.metrics.record_decision(start.elapsed());
        if let Ok(route_result) = receiver.try_recv() {
            return route_result;
        }
        if is_trial {
            self.update(|state, now| state.cancel_trial(now, attempt));
        }
        let mut slot = QueueSlot { queue: self, attempt, occupied: true };
        // A sender is dropped only after it has sent a result.
        let route_result = receiver.await.unwrap_or(Err(ScheduleRejection::UnknownModel));
        slot.occupied = false;
        self.metrics.record_queue_wait(start.elapsed());
        route_result
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
        let fleet = self.fleet.current();
        let constraints = RouteConstraints::new(routed, tried, EligibilityTier::Available, &fleet);
        routed.request.as_ref().is_some_and(|request| constraints.has_route(&fleet, request.model))
    }

    /// The prompt of a sent request has been computed.
    pub(super) fn record_prompt_computed(self: &Arc<Self>, attempt: AttemptId, cached_tokens: Option<u32>) {
        self.update(|state, now| state.prompt_computed(now, attempt, cached_tokens));
    }

    /// The engines of a sent request have loaded its LoRA adapter.
    pub(super) fn record_adapter_wait_ended(self: &Arc<Self>, attempt: AttemptId) {
        self.update(|state, now| state.scheduler.adapter_wait_ended(now, attempt));
    }

    /// An engine has loaded an adapter, or could not. `took` is the duration of an observed load.
    pub(crate) fn record_adapter_load(
        self: &Arc<Self>,
        endpoint: &Arc<UpstreamEndpoint>,
        adapter: ModelIndex,
        is_loaded: bool,
        took: Option<Duration>,
    ) {
        let took = took.map(|took| self.clock.to_scheduler_time(took));
        self.update(|state, now| {
            let mut ranks = InstanceIndex::all().zip(&state.fleet.members);
            match ranks.find(|(_, member)| Arc::ptr_eq(&member.endpoint, endpoint)) {
                Some((ix, _)) if is_loaded => state.scheduler.adapter_loaded(now, ix, adapter, took),
                Some((ix, _)) => state.scheduler.adapter_load_failed(now, ix, adapter),
                // The engine has left the fleet.
                None => {}
            }
        });
    }

    /// A sent request has ended. `output_tokens` is the length of a complete response.
    pub(super) fn record_ended(self: &Arc<Self>, attempt: AttemptId, output_tokens: Option<u64>) {
        self.update(|state, now| state.end(now, attempt, output_tokens));
    }

    /// Whether another gateway decides this one's requests.
    pub(super) fn follows(&self) -> bool {
        self.state.lock().follows()
    }

    /// Another gateway decides this one's requests from now on, or none.
    pub(super) fn set_leader(self: &Arc<Self>, leader: Option<LeaderLink>) {
        self.update(|state, now| state.set_leader(now, leader));
    }

    /// A message of the gateway that decides.
    pub(super) fn receive_decision(self: &Arc<Self>, message: LeaderMessage) {
        self.update(|state, now| state.receive_decision(now, message, self));
    }

    /// Queues a request of another gateway. `None` if it was rejected.
    pub(super) fn submit_ticket(
        self: &Arc<Self>,
        link: &FollowerLink,
        ticket: QueueTicket,
    ) -> Option<AttemptId> {
        self.update(|state, now| state.submit_ticket(now, link, ticket, self.capacity))
    }

    /// A message of another gateway about its request `attempt`, other than its submission.
    pub(super) fn receive_ticket_message(self: &Arc<Self>, attempt: AttemptId, message: TicketMessage) {
        self.update(|state, now| match message {
            TicketMessage::Alive | TicketMessage::Submit(_) => {}
            TicketMessage::Exclude { excluded, .. } => state.exclude_for_follower(attempt, excluded),
            TicketMessage::PromptComputed { cached_tokens, .. } => {
                state.scheduler.first_token(now, attempt, cached_tokens);
            }
            TicketMessage::End { output_tokens, .. } => {
                state.waiting.remove(&attempt);
                state.end_here(now, attempt, output_tokens);
            }
        });
    }

    /// An engine has reported the load of its ranks.
    pub(crate) fn record_load(self: &Arc<Self>, endpoint: &Arc<UpstreamEndpoint>, loads: &RankLoads) {
        self.update(|state, now| {
            let ranks = InstanceIndex::all().zip(&state.fleet.members);
            for (ix, member) in ranks.filter(|(_, member)| Arc::ptr_eq(&member.endpoint, endpoint)) {
                let load = loads.of_rank(member.rank, member.rank_count());
                let reported = ReportedLoad {
                    running: load.running,
                    waiting: load.waiting,
                    waiting_uncached_tokens: load.waiting_uncached_tokens,
                    used_tokens: load.used_tokens,
                    capacity_tokens: load.capacity_tokens,
                    ..ReportedLoad::default()
                };
                state.scheduler.report(now, ix, reported);
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

    /// Load of the fleet as a fraction of its capacity; infinite while a background request would delay others.
    pub(crate) fn background_load(self: &Arc<Self>) -> f64 {
        if self.queued() > 0 {
            return f64::INFINITY;
        }
        self.update(|state, now| {
            let unknown = unscheduled_requests(&state.fleet, state.scheduler.loads(now));
            state.scheduler.background_load(now, &unknown)
        })
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
            let locked = Instant::now();
            let now = self.clock.seconds_at(locked);
            let before = state.scheduler.next_poll_at();
            state.sync_fleet(now, self.fleet.current());
            let result = change(&mut state, now);
            let deliveries = state.poll(now, self);
            let moved = state.scheduler.next_poll_at() != before;
            drop(state);
            self.metrics.scheduler_lock_seconds.inc_by(locked.elapsed().as_secs_f64());
            (result, deliveries, moved)
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

impl Drop for QueueSlot<'_> {
    fn drop(&mut self) {
        if !self.occupied {
            return;
        }
        self.queue.update(|state, now| {
            if state.waiting.remove(&self.attempt).is_some() {
                state.end(now, self.attempt, None);
            }
        });
    }
}

impl fmt::Debug for AdmissionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdmissionQueue").field("queued", &self.queued()).finish_non_exhaustive()
    }
}
