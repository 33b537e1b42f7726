//! Decisions, and how a trace explains them.

use std::sync::Arc;

use moongate_scheduler::{Refusal, Route, Term, Terms};
use moongate_telemetry::{Notes, Steps};
use tokio::time::Instant;

use super::tries::{Again, Try};
use crate::dispatch::{Chosen, Reasons};
use crate::fleet::Endpoint;

/// Most candidates of a decision that are told: the cheapest.
const MAX_CANDIDATES: usize = 8;

impl Try<'_> {
    /// A decision begins.
    pub(crate) fn decide(&self) -> Deciding<'_> {
        let again = (self.number > 1).then(Instant::now);
        Deciding { of: self, again, end: None, outcome: Outcome::None }
    }
}

/// A decision that is being made, until it is dropped.
pub(crate) struct Deciding<'a> {
    of: &'a Try<'a>,
    /// When it began, of those that are not the first.
    again: Option<Instant>,
    end: Option<Instant>,
    outcome: Outcome,
}

impl Deciding<'_> {
    /// This was decided at `at`.
    pub(crate) fn decided(mut self, chosen: &Result<Chosen, Refusal>, at: Instant) {
        if self.of.span.root.is_recording() {
            self.end = Some(at);
            self.outcome = match chosen {
                Err(refusal) => Outcome::Refused(refusal.to_string()),
                Ok(Chosen { reasons: Some(reasons), .. }) => Outcome::Reasons(reasons.clone()),
                Ok(chosen) => Outcome::Entry(chosen.entry.endpoint.clone()),
            };
        }
    }
}

impl Drop for Deciding<'_> {
    fn drop(&mut self) {
        if let Some(facts) = self.of.span.root.facts() {
            let end = self.end.unwrap_or_else(Instant::now);
            let outcome = std::mem::replace(&mut self.outcome, Outcome::None);
            let again = self.again.zip(self.of.again());
            facts.decisions.lock().push(Decided { end, again, outcome });
        }
    }
}

/// A decision.
#[derive(Debug)]
pub(super) struct Decided {
    end: Instant,
    /// When it began and why, if it is not the first.
    again: Option<(Instant, Box<Again>)>,
    outcome: Outcome,
}

#[derive(Debug)]
enum Outcome {
    /// The client left before.
    None,
    Refused(String),
    /// Without a decision of the scheduler's.
    Entry(Arc<Endpoint>),
    Reasons(Reasons),
}

impl Decided {
    /// The first has begun at `start`.
    pub(super) fn tell(&self, start: Instant, steps: &mut Steps<'_>) {
        let start = self.again.as_ref().map_or(start, |(start, _)| *start);
        steps.step("decide", (start, self.end), |notes| {
            if let Some((_, again)) = &self.again {
                again.tell(notes);
            }
            match &self.outcome {
                Outcome::None => {}
                Outcome::Refused(refusal) => notes.error(refusal),
                Outcome::Entry(endpoint) => notes.set("moongate.entry", &*endpoint.id.0),
                Outcome::Reasons(reasons) => explain(reasons, notes),
            }
        });
    }
}

fn explain(Reasons { decision, fleet }: &Reasons, notes: &mut Notes<'_>) {
    let name = |ix| fleet.member(ix).map_or("", |member| &*member.endpoint.id.0);
    let why = &decision.explanation;
    notes.set("moongate.entry", name(decision.route.entry()));
    if let Route::Pair { decode, .. } = decision.route {
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
    let leading = candidates.map(|candidate| term(candidate.leading_term));
    notes.list("moongate.candidate.leading_term", leading);
    explain_terms(cheapest.iter().filter_map(|position| why.terms.get(*position)), notes);
}

/// One value for each candidate. Terms that are nothing for all go without saying.
fn explain_terms<'a>(terms: impl Iterator<Item = &'a Terms> + Clone, notes: &mut Notes<'_>) {
    let mut tell = |key: &'static str, seconds: fn(&Terms) -> f64| {
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

fn term(term: Term) -> &'static str {
    match term {
        Term::None => "none",
        Term::Backlog => "backlog",
        Term::Service => "service",
        Term::Fetch => "fetch",
    }
}
