//! Decisions, and how a trace explains them.

use std::sync::Arc;

use moongate_scheduler::{CostBreakdown, CostTerm, EngineRoute, ScheduleRejection};
use moongate_telemetry::{AttributeWriter, ChildSpans};
use tokio::time::Instant;

use super::attempts::{AttemptTrace, RetryCause};
use crate::dispatch::{ChosenRoute, FleetDecision};
use crate::fleet::UpstreamEndpoint;

/// Most candidates of a decision that are told: the cheapest.
const MAX_CANDIDATES: usize = 8;

impl AttemptTrace<'_> {
    /// A decision begins.
    pub(crate) fn decide(&self) -> DecisionGuard<'_> {
        let again = (self.number > 1).then(Instant::now);
        DecisionGuard { attempt: self, retry_started: again, end: None, outcome: DecisionOutcome::None }
    }
}

/// A decision that is being made, until it is dropped.
pub(crate) struct DecisionGuard<'a> {
    attempt: &'a AttemptTrace<'a>,
    /// When it began, of those that are not the first.
    retry_started: Option<Instant>,
    end: Option<Instant>,
    outcome: DecisionOutcome,
}

impl DecisionGuard<'_> {
    /// This was decided at `at`.
    pub(crate) fn finish(mut self, chosen: &Result<ChosenRoute, ScheduleRejection>, at: Instant) {
        if self.attempt.span.root.is_recording() {
            self.end = Some(at);
            self.outcome = match chosen {
                Err(refusal) => DecisionOutcome::Refused(refusal.to_string()),
                Ok(ChosenRoute { decision: Some(reasons), .. }) => DecisionOutcome::Decision(reasons.clone()),
                Ok(chosen) => DecisionOutcome::Passthrough(chosen.prefill.endpoint.clone()),
            };
        }
    }
}

impl Drop for DecisionGuard<'_> {
    fn drop(&mut self) {
        if let Some(facts) = self.attempt.span.root.attributes() {
            let end = self.end.unwrap_or_else(Instant::now);
            let outcome = std::mem::replace(&mut self.outcome, DecisionOutcome::None);
            let again = self.retry_started.zip(self.attempt.retry_cause());
            facts.decisions.lock().push(DecisionSpan { end, retry: again, outcome });
        }
    }
}

/// A decision.
#[derive(Debug)]
pub(super) struct DecisionSpan {
    end: Instant,
    /// When it began and why, if it is not the first.
    retry: Option<(Instant, Box<RetryCause>)>,
    outcome: DecisionOutcome,
}

#[derive(Debug)]
enum DecisionOutcome {
    /// The client left before.
    None,
    Refused(String),
    /// Without a decision of the scheduler's.
    Passthrough(Arc<UpstreamEndpoint>),
    Decision(FleetDecision),
}

impl DecisionSpan {
    /// The first has begun at `start`.
    pub(super) fn write_span(&self, start: Instant, steps: &mut ChildSpans<'_>) {
        let start = self.retry.as_ref().map_or(start, |(start, _)| *start);
        steps.add("decide", (start, self.end), |notes| {
            if let Some((_, again)) = &self.retry {
                again.write_attributes(notes);
            }
            match &self.outcome {
                DecisionOutcome::None => {}
                DecisionOutcome::Refused(refusal) => notes.error(refusal),
                DecisionOutcome::Passthrough(endpoint) => notes.set("moongate.entry", &*endpoint.id.0),
                DecisionOutcome::Decision(reasons) => write_decision(reasons, notes),
            }
        });
    }
}

fn write_decision(FleetDecision { decision, fleet }: &FleetDecision, notes: &mut AttributeWriter<'_>) {
    let name = |ix| fleet.member(ix).map_or("", |member| &*member.endpoint.id.0);
    let why = &decision.explanation;
    notes.set("moongate.entry", name(decision.route.prefill_instance()));
    if let EngineRoute::Pair { decode, .. } = decision.route {
        notes.set("moongate.decode", name(decode));
    }
    notes.set("moongate.policy", why.policy.as_str());
    notes.set("moongate.reason", why.reason);
    notes.set("moongate.candidates", why.candidates.len());
    if let Some(ttft) = decision.predicted_ttft {
        notes.set("moongate.predicted.ttft", ttft);
    }
    let mut cheapest: Vec<usize> = (0..why.candidates.len()).collect();
    cheapest.sort_by(|a, b| why.candidates[*a].cost.total_cmp(&why.candidates[*b].cost));
    cheapest.truncate(MAX_CANDIDATES);
    let candidates = cheapest.iter().map(|position| &why.candidates[*position]);
    notes.list("moongate.candidate.engine", candidates.clone().map(|candidate| name(candidate.instance)));
    notes.list("moongate.candidate.cost", candidates.clone().map(|candidate| candidate.cost));
    let leading = candidates.map(|candidate| term_name(candidate.leading_term));
    notes.list("moongate.candidate.leading_term", leading);
    write_terms(cheapest.iter().filter_map(|position| why.terms.get(*position)), notes);
}

/// One value for each candidate. Terms that are nothing for all go without saying.
fn write_terms<'a>(terms: impl Iterator<Item = &'a CostBreakdown> + Clone, notes: &mut AttributeWriter<'_>) {
    let mut tell = |key: &'static str, seconds: fn(&CostBreakdown) -> f64| {
        let seconds = terms.clone().map(seconds);
        if seconds.clone().any(|seconds| seconds != 0.0) {
            notes.list(key, seconds);
        }
    };
    tell("moongate.term.wait", |terms| terms.wait);
    tell("moongate.term.fetch", |terms| terms.fetch);
    tell("moongate.term.service", |terms| terms.service);
    tell("moongate.term.handover", |terms| terms.handover);
    tell("moongate.term.duplicate", |terms| terms.duplicate);
    tell("moongate.term.congestion", |terms| terms.congestion);
    tell("moongate.term.length", |terms| terms.length);
    tell("moongate.term.decode", |terms| terms.decode);
    let cached = terms.map(|terms| terms.cached_tokens);
    if cached.clone().next().is_some() {
        notes.list("moongate.candidate.cached_tokens", cached);
    }
}

fn term_name(term: CostTerm) -> &'static str {
    match term {
        CostTerm::None => "none",
        CostTerm::Backlog => "backlog",
        CostTerm::Service => "service",
        CostTerm::Fetch => "fetch",
    }
}
