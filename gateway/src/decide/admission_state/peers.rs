//! Decisions by another gateway, and for other gateways.

use std::sync::Arc;

use http::HeaderValue;
use moongate_scheduler::{AttemptId, DecisionExplanation, RoutingDecision, ScheduleRejection};
use tokio::time::Instant;

use super::{AdmissionState, AdmissionWaiter, DecisionRecipient, FollowerLink, LeaderLink};
use crate::decide::admission_queue::{AdmissionQueue, QUEUE_FULL_RETRY_AFTER};
use crate::decide::shared_queue::{
    EngineHits, LeaderMessage, QueueTicket, TicketMessage, TicketRejection, TicketRoute, engine_names,
    excluded_engines,
};
use crate::fleet::FleetSnapshot;

/// Longest time in seconds for which a request of another gateway counts as queued.
const MAX_WAITED: f64 = 3_600.0;

impl AdmissionState {
    /// Sends a queued request to the leader. Returns whether there is one.
    pub(in crate::decide) fn submit_to_leader(&mut self, now: f64, attempt: AttemptId) -> bool {
        let (Some(_), Some(waiter)) = (&self.leader, self.waiting.get(&attempt)) else { return false };
        let Some(submission) = &waiter.submission else { return false };
        let Some(model) = self.fleet.model_name(submission.request.model) else { return false };
        let ticket = QueueTicket {
            ticket: attempt.0,
            id: String::from_utf8_lossy(waiter.id.as_bytes()).into_owned(),
            model: model.to_string(),
            request: submission.request.clone(),
            waited: now - waiter.arrived,
            stream: waiter.stream,
            hits: EngineHits::of_prediction(&submission.prediction, &self.fleet),
            excluded: engine_names(&submission.excluded, &self.fleet),
        };
        self.send_to_leader(TicketMessage::Submit(Box::new(ticket)));
        true
    }

    pub(in crate::decide) fn send_to_leader(&self, message: TicketMessage) {
        if let Some(leader) = &self.leader
            && leader.messages.try_send(message).is_err()
        {
            leader.closing.cancel();
        }
    }

    /// Whether another gateway decides.
    pub(in crate::decide) fn follows(&self) -> bool {
        self.leader.is_some()
    }

    /// Another gateway decides from now on, or none. Queued requests move to the new place.
    pub(in crate::decide) fn set_leader(&mut self, now: f64, leader: Option<LeaderLink>) {
        let follows = leader.is_some();
        self.leader = leader;
        for waiter in self.waiting.values() {
            // A gateway that follows another one decides for none.
            if let DecisionRecipient::Follower { link, .. } = &waiter.recipient
                && follows
            {
                link.closing.cancel();
            }
        }
        let mut queued: Vec<AttemptId> = self
            .waiting
            .iter()
            .filter(|(_, waiter)| waiter.submission.is_some())
            .map(|(attempt, _)| *attempt)
            .collect();
        queued.sort_unstable();
        for attempt in queued {
            // The request leaves this gateway's queue, if it is there.
            self.scheduler.ended(now, attempt);
            if !self.submit_to_leader(now, attempt) {
                self.submit_here(now, attempt);
            }
        }
    }

    fn submit_here(&mut self, now: f64, attempt: AttemptId) {
        let Some(waiter) = self.waiting.get(&attempt) else { return };
        let Some(submission) = waiter.submission.clone() else { return };
        self.shared_metrics.record_decided_alone();
        self.scheduler.submit_waiting(now, attempt, submission, now - waiter.arrived);
    }

    /// A message of the leader about one of this gateway's requests.
    pub(in crate::decide) fn receive_decision(
        &mut self,
        now: f64,
        message: LeaderMessage,
        queue: &Arc<AdmissionQueue>,
    ) {
        match message {
            LeaderMessage::Alive => {}
            LeaderMessage::Send(route) => self.receive_route(now, &route, queue),
            LeaderMessage::Reject { ticket, rejection: TicketRejection::Overloaded { retry_after } } => {
                self.shared_metrics.record_decided_by_leader();
                if let Some(AdmissionWaiter {
                    recipient: DecisionRecipient::Request { sender, .. }, ..
                }) = self.waiting.remove(&AttemptId(ticket))
                {
                    self.decided.push((Some(sender), Err(ScheduleRejection::Overloaded { retry_after })));
                }
                self.send_to_leader(TicketMessage::End { ticket, output_tokens: None });
            }
            LeaderMessage::Reject { ticket, rejection: TicketRejection::NoRoute } => {
                self.submit_here(now, AttemptId(ticket));
            }
        }
    }

    fn receive_route(&mut self, now: f64, message: &TicketRoute, queue: &Arc<AdmissionQueue>) {
        let attempt = AttemptId(message.ticket);
        let Some(waiter) = self.waiting.remove(&attempt) else {
            if !self.scheduler.is_in_flight(attempt) {
                // Its client has left in the meantime.
                self.send_to_leader(TicketMessage::End { ticket: attempt.0, output_tokens: None });
            }
            return;
        };
        let (Some(submission), Some(route)) = (&waiter.submission, message.route(&self.fleet)) else {
            // The engine is not in this gateway's fleet.
            self.send_to_leader(TicketMessage::End { ticket: attempt.0, output_tokens: None });
            self.waiting.insert(attempt, waiter);
            self.submit_here(now, attempt);
            return;
        };
        let decision = RoutingDecision {
            route,
            reservation: message.reservation,
            engine_priority: message.engine_priority,
            predicted_ttft: message.predicted_ttft,
            expected_ttft: message.expected_ttft,
            pending_tokens: 0,
            explanation: DecisionExplanation {
                policy: queue.policy(),
                reason: "decided by the leading gateway",
                candidates: Vec::new(),
                terms: Vec::new(),
            },
        };
        self.shared_metrics.record_decided_by_leader();
        self.scheduler.adopt(now, attempt, submission, &decision);
        self.deliver(now, attempt, decision, Some(waiter), queue);
    }

    /// Queues a request of another gateway. `None` if it was rejected.
    pub(in crate::decide) fn submit_ticket(
        &mut self,
        now: f64,
        link: &FollowerLink,
        ticket: QueueTicket,
        capacity: usize,
    ) -> Option<AttemptId> {
        let number = ticket.ticket;
        let reject = |rejection| {
            link.send(LeaderMessage::Reject { ticket: number, rejection });
            None
        };
        if self.waiting.len() >= capacity {
            return reject(TicketRejection::Overloaded { retry_after: QUEUE_FULL_RETRY_AFTER });
        }
        let (Some(submission), Ok(id)) =
            (ticket.schedule_request(&self.fleet), HeaderValue::try_from(ticket.id.as_str()))
        else {
            return reject(TicketRejection::NoRoute);
        };
        // Clocks of gateways do not matter, but a wrong number must not put a request before all others for ever.
        let waited = ticket.waited.clamp(0.0, MAX_WAITED);
        let attempt = AttemptId(self.next_attempt);
        self.next_attempt += 1;
        let recipient =
            DecisionRecipient::Follower { link: link.clone(), ticket: number, excluded: ticket.excluded };
        let waiter = AdmissionWaiter {
            recipient,
            stream: ticket.stream,
            id,
            alias: None,
            queued_at: Instant::now(),
            arrived: now - waited,
            submission: None,
        };
        self.waiting.insert(attempt, waiter);
        self.scheduler.submit_waiting(now, attempt, submission, waited);
        Some(attempt)
    }

    /// Other engines are excluded for a request of another gateway.
    pub(in crate::decide) fn exclude_for_follower(&mut self, attempt: AttemptId, ids: Vec<String>) {
        if let Some(AdmissionWaiter { recipient: DecisionRecipient::Follower { excluded, .. }, .. }) =
            self.waiting.get_mut(&attempt)
        {
            self.scheduler.exclude(attempt, excluded_engines(&ids, &self.fleet));
            *excluded = ids;
        }
    }

    /// The submissions of queued requests refer to engines by their position in the fleet.
    pub(in crate::decide) fn renumber_submissions(&mut self, fleet: &FleetSnapshot) {
        for submission in self.waiting.values_mut().filter_map(|waiter| waiter.submission.as_mut()) {
            let hits = EngineHits::of_prediction(&submission.prediction, &self.fleet);
            submission.prediction = EngineHits::to_prediction(&hits, fleet);
        }
    }
}
