//! Spans of decisions, with the explanation of the scheduler.

use std::sync::Arc;

use moongate_scheduler::{CostBreakdown, CostTerm, EngineRoute, ScheduleRejection};
use moongate_telemetry::{AttributeWriter, ChildSpans};
use tokio::time::Instant;

use super::attempts::{AttemptTrace, RetryCause};
use crate::fleet::{FleetDecision, UpstreamEndpoint};

/// Most candidates in a decision's span: the cheapest ones.
const MAX_CANDIDATES: usize = 8;

impl AttemptTrace<'_> {
    /// Starts the span of a decision.
    pub(crate) fn decide(&self) -> DecisionGuard<'_> {
        let retry = (self.number > 1).then(Instant::now);
        DecisionGuard { attempt: self, retry_started: retry, end: None, outcome: DecisionOutcome::None }
    }
}

/// The route of an attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DecidedRoute<'a> {
    Scheduled(&'a FleetDecision),
    /// Bypassed the scheduler.
    Passthrough(&'a Arc<UpstreamEndpoint>),
}

/// A decision in progress; its span is written on drop.
pub(crate) struct DecisionGuard<'a> {
    attempt: &'a AttemptTrace<'a>,
    /// Start of the decision, for attempts after the first.
    retry_started: Option<Instant>,
    end: Option<Instant>,
    outcome: DecisionOutcome,
}

impl DecisionGuard<'_> {
    /// Records the outcome of the decision at `at`.
    pub(crate) fn finish(mut self, route: Result<DecidedRoute<'_>, &ScheduleRejection>, at: Instant) {
        if self.attempt.span.root.is_recording() {
            self.end = Some(at);
            self.outcome = match route {
                Err(rejection) => DecisionOutcome::Refused(rejection.to_string()),
                Ok(DecidedRoute::Scheduled(decision)) => DecisionOutcome::Decision(decision.clone()),
                Ok(DecidedRoute::Passthrough(endpoint)) => DecisionOutcome::Passthrough(endpoint.clone()),
            };
        }
    }
}

impl Drop for DecisionGuard<'_> {
    fn drop(&mut self) {
        if let Some(fields) = self.attempt.span.root.attributes() {
            let end = self.end.unwrap_or_else(Instant::now);
            let outcome = std::mem::replace(&mut self.outcome, DecisionOutcome::None);
            let retry = self.retry_started.zip(self.attempt.retry_cause());
            fields.decisions.lock().push(DecisionSpan { end, retry, outcome });
        }
    }
}

#[derive(Debug)]
pub(super) struct DecisionSpan {
    end: Instant,
    /// Start and cause, for attempts after the first.
    retry: Option<(Instant, Box<RetryCause>)>,
    outcome: DecisionOutcome,
}

#[derive(Debug)]
enum DecisionOutcome {
    /// The client left before the decision.
    None,
    Refused(String),
    /// Bypassed the scheduler.
    Passthrough(Arc<UpstreamEndpoint>),
    Decision(FleetDecision),
}

impl DecisionSpan {
    /// Writes the span; the first decision started at `start`.
    pub(super) fn write_span(&self, start: Instant, children: &mut ChildSpans<'_>) {
        let start = self.retry.as_ref().map_or(start, |(start, _)| *start);
        children.add("decide", (start, self.end), |attributes| {
            if let Some((_, retry)) = &self.retry {
                retry.write_attributes(attributes);
            }
            match &self.outcome {
                DecisionOutcome::None => {}
                DecisionOutcome::Refused(rejection) => attributes.error(rejection),
                DecisionOutcome::Passthrough(endpoint) => attributes.set("moongate.prefill", &*endpoint.id.0),
                DecisionOutcome::Decision(fleet_decision) => write_decision(fleet_decision, attributes),
            }
        });
    }
}

fn write_decision(FleetDecision { decision, fleet }: &FleetDecision, attributes: &mut AttributeWriter<'_>) {
    let name = |ix| fleet.member(ix).map_or("", |member| &*member.name);
    let explanation = &decision.explanation;
    attributes.set("moongate.prefill", name(decision.route.prefill_instance()));
    if let EngineRoute::Pair { decode, .. } = decision.route {
        attributes.set("moongate.decode", name(decode));
    }
    attributes.set("moongate.policy", explanation.policy.as_str());
    attributes.set("moongate.reason", explanation.reason);
    attributes.set("moongate.candidates", explanation.candidates.len());
    if let Some(ttft) = decision.predicted_ttft {
        attributes.set("moongate.predicted.ttft", ttft);
    }
    let mut cheapest: Vec<usize> = (0..explanation.candidates.len()).collect();
    cheapest.sort_by(|a, b| explanation.candidates[*a].cost.total_cmp(&explanation.candidates[*b].cost));
    cheapest.truncate(MAX_CANDIDATES);
    let candidates = cheapest.iter().map(|position| &explanation.candidates[*position]);
    attributes
        .list("moongate.candidate.engine", candidates.clone().map(|candidate| name(candidate.instance)));
    attributes.list("moongate.candidate.cost", candidates.clone().map(|candidate| candidate.cost));
    let leading = candidates.map(|candidate| term_name(candidate.leading_term));
    attributes.list("moongate.candidate.leading_term", leading);
    write_terms(cheapest.iter().filter_map(|position| explanation.terms.get(*position)), attributes);
}

/// One value for each candidate. Terms that are 0 for all candidates are omitted.
fn write_terms<'a>(
    terms: impl Iterator<Item = &'a CostBreakdown> + Clone,
    attributes: &mut AttributeWriter<'_>,
) {
    let mut write_term = |key: &'static str, seconds: fn(&CostBreakdown) -> f64| {
        let seconds = terms.clone().map(seconds);
        if seconds.clone().any(|seconds| seconds != 0.0) {
            attributes.list(key, seconds);
        }
    };
    write_term("moongate.term.wait", |terms| terms.wait);
    write_term("moongate.term.fetch", |terms| terms.fetch);
    write_term("moongate.term.service", |terms| terms.service);
    write_term("moongate.term.handover", |terms| terms.handover);
    write_term("moongate.term.adapter_load", |terms| terms.adapter_load);
    write_term("moongate.term.duplicate", |terms| terms.duplicate);
    write_term("moongate.term.congestion", |terms| terms.congestion);
    write_term("moongate.term.length", |terms| terms.length);
    write_term("moongate.term.decode", |terms| terms.decode);
    let cached = terms.map(|terms| terms.cached_tokens);
    if cached.clone().next().is_some() {
        attributes.list("moongate.candidate.cached_tokens", cached);
    }
}

fn term_name(term: CostTerm) -> &'static str {
    match term {
        CostTerm::None => "none",
        CostTerm::Backlog => "backlog",
        CostTerm::Service => "service",
        CostTerm::Fetch => "fetch",
        CostTerm::AdapterLoad => "adapter_load",
    }
}
