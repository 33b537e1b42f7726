//! State of the admission queue: the scheduler, and the requests that wait for its decisions.

mod peers;

use std::collections::HashMap;
use std::sync::Arc;

use http::HeaderValue;
use moongate_scheduler::{
    AttemptId, RoutingDecision, ScheduleRejection, ScheduleRequest, Scheduler, SchedulerEvent,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::admission_queue::AdmissionQueue;
use super::eligibility::{ChosenRoute, RouteConstraints, route_members};
use super::in_flight::InFlightGuard;
use super::shared_queue::{
    LeaderMessage, TicketMessage, TicketRejection, TicketRoute, engine_names, excluded_engines,
};
use crate::feedback::{DecidedRequest, DecisionHistory, SharedQueueMetrics};
use crate::fleet::{FleetDecision, FleetSnapshot};

pub(super) type RouteResult = Result<ChosenRoute, ScheduleRejection>;
/// A result with its receiver. It must not be dropped while the queue's state is locked: its in-flight guard locks it on drop.
pub(super) type RouteDelivery = (Option<oneshot::Sender<RouteResult>>, RouteResult);

pub(super) struct AdmissionState {
    pub(super) scheduler: Scheduler,
    /// The fleet that the scheduler was last given.
    pub(super) fleet: Arc<FleetSnapshot>,
    /// Per engine at the latest check: whether it was available, and whether a trial was due.
    availability: Vec<(bool, bool)>,
    pub(super) waiting: HashMap<AttemptId, AdmissionWaiter>,
    decisions: Arc<DecisionHistory>,
    next_attempt: u64,
    events: Vec<SchedulerEvent>,
    /// Whether requests can be decided by another gateway.
    pub(super) is_shared: bool,
    /// The gateway that decides.
    leader: Option<LeaderLink>,
    /// Results of decisions by the leader, to be delivered.
    decided: Vec<RouteDelivery>,
    shared_metrics: SharedQueueMetrics,
}

/// Connection to the gateway that decides.
#[derive(Debug)]
pub(super) struct LeaderLink {
    pub(super) messages: mpsc::Sender<TicketMessage>,
    /// Ends the connection.
    pub(super) closing: CancellationToken,
}

/// Connection of a gateway for which this one decides.
#[derive(Debug, Clone)]
pub(super) struct FollowerLink {
    pub(super) messages: mpsc::Sender<LeaderMessage>,
    /// Ends the connection.
    pub(super) closing: CancellationToken,
}

impl FollowerLink {
    /// Sends a message. A gateway that does not receive its messages is disconnected.
    fn send(&self, message: LeaderMessage) {
        if self.messages.try_send(message).is_err() && !self.closing.is_cancelled() {
            tracing::warn!(
                "a gateway of the shared queue receives its decisions too slowly; its connection is closed"
            );
            self.closing.cancel();
        }
    }
}

/// A request that is queued, or about to get its route.
pub(super) struct AdmissionWaiter {
    pub(super) recipient: DecisionRecipient,
    pub(super) stream: bool,
    pub(super) id: HeaderValue,
    /// The alias by which the client named the model.
    pub(super) alias: Option<Arc<str>>,
    pub(super) queued_at: Instant,
    /// When it was queued, by the scheduler's clock.
    pub(super) arrived: f64,
    /// Its submission, if another gateway may decide it.
    pub(super) submission: Option<ScheduleRequest>,
}

/// Who gets the decision.
pub(super) enum DecisionRecipient {
    /// A request of this gateway.
    Request { sender: oneshot::Sender<RouteResult>, constraints: RouteConstraints },
    /// Another gateway.
    Follower { link: FollowerLink, ticket: u64, excluded: Vec<String> },
}

impl AdmissionState {
    pub(super) fn new(
        scheduler: Scheduler,
        decisions: Arc<DecisionHistory>,
        is_shared: bool,
        shared_metrics: SharedQueueMetrics,
    ) -> Self {
        Self {
            decisions,
            scheduler,
            fleet: Arc::default(),
            availability: Vec::new(),
            waiting: HashMap::new(),
            next_attempt: 0,
            events: Vec::new(),
            is_shared,
            leader: None,
            decided: Vec::new(),
            shared_metrics,
        }
    }

    /// Adds a request. A trial of a suspect engine is decided here, because only this gateway suspects it.
    pub(super) fn enqueue(
        &mut self,
        now: f64,
        mut waiter: AdmissionWaiter,
        submission: ScheduleRequest,
    ) -> AttemptId {
        let attempt = AttemptId(self.next_attempt);
        self.next_attempt += 1;
        let is_trial = matches!(&waiter.recipient, DecisionRecipient::Request { constraints, .. } if constraints.is_trial());
        if self.is_shared && matches!(waiter.recipient, DecisionRecipient::Request { .. }) {
            waiter.submission = Some(submission.clone());
        }
        self.waiting.insert(attempt, waiter);
        if is_trial || !self.submit_to_leader(now, attempt) {
            self.scheduler.submit(now, attempt, submission);
        }
        attempt
    }

    /// Builds the route of a decision, and adds it to the results to be delivered.
    fn deliver(
        &mut self,
        now: f64,
        attempt: AttemptId,
        decision: RoutingDecision,
        waiter: Option<AdmissionWaiter>,
        queue: &Arc<AdmissionQueue>,
    ) {
        let (sender, stream) = match waiter {
            Some(AdmissionWaiter {
                recipient: DecisionRecipient::Follower { link, ticket, .. },
                stream,
                ..
            }) => {
                match TicketRoute::new(ticket, &decision, &self.fleet) {
                    Some(route) => {
                        link.send(LeaderMessage::Send(Box::new(route)));
                        if decision.route.prefill_instance() == decision.route.decode_instance() && !stream {
                            self.scheduler.first_token_unobserved(attempt);
                        }
                    }
                    None => {
                        self.scheduler.ended(now, attempt);
                        link.send(LeaderMessage::Reject { ticket, rejection: TicketRejection::NoRoute });
                    }
                }
                return;
            }
            Some(AdmissionWaiter {
                recipient: DecisionRecipient::Request { sender, .. }, stream, ..
            }) => (Some(sender), stream),
            None => (None, true),
        };
        let route = build_route(&self.fleet, attempt, decision, queue);
        match &route {
            // A worker's non-streamed response does not reveal its first token. Of a pair, the end of the prefill does.
            Some(ChosenRoute { decode: None, .. }) if !stream => {
                self.scheduler.first_token_unobserved(attempt);
            }
            None => self.end(now, attempt, None),
            _ => {}
        }
        self.decided.push((sender, route.ok_or(ScheduleRejection::UnknownModel)));
    }

    /// The prompt of a sent request has been computed.
    pub(super) fn prompt_computed(&mut self, now: f64, attempt: AttemptId, cached_tokens: Option<u32>) {
        self.scheduler.first_token(now, attempt, cached_tokens);
        self.send_to_leader(TicketMessage::PromptComputed { ticket: attempt.0, cached_tokens });
    }

    /// A request of this gateway has ended.
    pub(super) fn end(&mut self, now: f64, attempt: AttemptId, output_tokens: Option<u64>) {
        self.end_here(now, attempt, output_tokens);
        self.send_to_leader(TicketMessage::End { ticket: attempt.0, output_tokens });
    }

    /// A request, of any gateway, has ended.
    pub(super) fn end_here(&mut self, now: f64, attempt: AttemptId, output_tokens: Option<u64>) {
        if let Some(output_tokens) = output_tokens {
            self.scheduler.response_complete(now, attempt, output_tokens);
        }
        self.scheduler.ended(now, attempt);
    }

    /// A queued request waits for available engines, not for the trial.
    pub(super) fn cancel_trial(&mut self, now: f64, attempt: AttemptId) {
        let Some(waiter) = self.waiting.get_mut(&attempt) else { return };
        let DecisionRecipient::Request { constraints, .. } = &mut waiter.recipient else { return };
        constraints.cancel_trial();
        let excluded = constraints.excluded(&self.fleet);
        if let Some(submission) = &mut waiter.submission {
            submission.excluded.clone_from(&excluded);
        }
        if self.submit_to_leader(now, attempt) {
            self.scheduler.ended(now, attempt);
        } else {
            self.scheduler.exclude(attempt, excluded);
        }
    }

    /// Applies changes of the fleet and of engine availability to the scheduler.
    pub(super) fn sync_fleet(&mut self, now: f64, fleet: Arc<FleetSnapshot>) {
        let changed = !Arc::ptr_eq(&self.fleet, &fleet);
        if changed {
            self.scheduler.set_cluster(now, fleet.cluster.clone());
            self.renumber_submissions(&fleet);
            self.fleet = fleet;
        }
        if self.waiting.is_empty() {
            return;
        }
        let instant = Instant::now();
        let availability = self.fleet.members.iter().map(|member| {
            let endpoint = &member.endpoint;
            (endpoint.is_available(), endpoint.silence.is_trial_due(instant))
        });
        if !changed && availability.clone().eq(self.availability.iter().copied()) {
            return;
        }
        self.availability = availability.collect();
        let mut messages = Vec::new();
        for (attempt, waiter) in &mut self.waiting {
            let engines = waiter.recipient.excluded(&self.fleet);
            if let Some(submission) = &mut waiter.submission {
                submission.excluded.clone_from(&engines);
                let excluded = engine_names(&engines, &self.fleet);
                messages.push(TicketMessage::Exclude { ticket: attempt.0, excluded });
            }
            self.scheduler.exclude(*attempt, engines);
        }
        messages.into_iter().for_each(|message| self.send_to_leader(message));
    }

    /// Polls the scheduler. Returns results to deliver after the lock is released.
    pub(super) fn poll(&mut self, now: f64, queue: &Arc<AdmissionQueue>) -> Vec<RouteDelivery> {
        self.scheduler.poll(now, fastrand::u64(..), &mut self.events);
        // Snapshots of `Send` events, in the same order; of a large fleet not of each.
        let mut snapshots = self.scheduler.take_captured().collect::<Vec<_>>().into_iter().peekable();
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            match event {
                SchedulerEvent::Reject { attempt, rejection } => self.reject(attempt, rejection),
                SchedulerEvent::Send { attempt, decision } => {
                    let waiter = self.waiting.remove(&attempt);
                    let snapshot = snapshots.next_if(|(captured, _)| *captured == attempt);
                    if let (Some((_, snapshot)), Some(waiter)) = (snapshot, &waiter) {
                        let request = DecidedRequest {
                            id: waiter.id.as_bytes(),
                            alias: waiter.alias.clone(),
                            queued: waiter.queued_at.elapsed(),
                        };
                        self.decisions.push(request, decision.clone(), snapshot, &self.fleet);
                    }
                    self.deliver(now, attempt, decision, waiter, queue);
                }
            }
        }
        self.events = events;
        std::mem::take(&mut self.decided)
    }

    fn reject(&mut self, attempt: AttemptId, rejection: ScheduleRejection) {
        match self.waiting.remove(&attempt).map(|waiter| waiter.recipient) {
            Some(DecisionRecipient::Follower { link, ticket, .. }) => {
                link.send(LeaderMessage::Reject { ticket, rejection: (&rejection).into() });
            }
            Some(DecisionRecipient::Request { sender, .. }) => {
                self.decided.push((Some(sender), Err(rejection)));
            }
            None => {}
        }
    }
}

impl DecisionRecipient {
    /// The engines that the request must avoid.
    fn excluded(&self, fleet: &FleetSnapshot) -> Vec<moongate_scheduler::InstanceIndex> {
        match self {
            Self::Request { constraints, .. } => constraints.excluded(fleet),
            Self::Follower { excluded, .. } => excluded_engines(excluded, fleet),
        }
    }
}

/// `None` if an engine of the route is no longer in the fleet.
fn build_route(
    fleet: &Arc<FleetSnapshot>,
    attempt: AttemptId,
    decision: RoutingDecision,
    queue: &Arc<AdmissionQueue>,
) -> Option<ChosenRoute> {
    let (prefill, decode) = route_members(fleet, decision.route)?;
    let decode_endpoint = decode.as_ref().map(|decode| decode.endpoint.clone());
    let now = Instant::now();
    [Some(&prefill.endpoint), decode_endpoint.as_ref()]
        .into_iter()
        .flatten()
        .for_each(|engine| engine.silence.record_sent(now));
    let in_flight = InFlightGuard::routed(queue.clone(), attempt, prefill.endpoint.clone(), decode_endpoint);
    let reasons = FleetDecision { decision: Arc::new(decision), fleet: fleet.clone() };
    Some(ChosenRoute { prefill, decode, in_flight, decision: Some(reasons) })
}
