//! The spans of a request's steps.

use std::sync::Arc;
use std::time::SystemTime;

use moongate_discovery::Engine;
use moongate_scheduler::{Refusal, Route, Term};
use moongate_telemetry::{KeyValue, Notes, SpanContext, SpanHandle, SpanKind, Tell, names};

use super::RequestSpan;
use crate::dispatch::{Chosen, Reasons, Side};
use crate::fleet::{Endpoint, Member};
use crate::predict::{Predicted, Unknown};

/// Most candidates of a decision that are told: the cheapest.
const MAX_CANDIDATES: usize = 8;

/// Span of predicting cache hits.
pub(crate) struct PredictSpan(pub(super) SpanHandle);

impl PredictSpan {
    /// Notes what was found, and ends the span.
    pub(crate) fn predicted(mut self, found: Result<&Predicted, &Unknown>) {
        match found {
            Ok(predicted) => {
                self.0.set("moongate.input_tokens", i64::from(predicted.input_tokens));
                self.0.set("moongate.tokenized_by", predicted.tokenized_by.as_str());
            }
            Err(unknown) => self.0.set("moongate.unpredicted", unknown.name()),
        }
    }
}

/// One try to answer a request: a decision, and the legs that follow from it.
pub(crate) struct Try<'a> {
    pub(crate) span: &'a RequestSpan,
    /// From 1.
    pub(crate) number: u32,
    /// The leg whose failure this try is there for.
    pub(crate) after: Option<SpanContext>,
}

impl Try<'_> {
    fn child(&self, name: &'static str, kind: SpanKind) -> SpanHandle {
        let mut span = self.span.root.child(name, kind);
        if self.number > 1 {
            span.set(names::HTTP_REQUEST_RESEND_COUNT, i64::from(self.number) - 1);
            if let Some(failed) = &self.after {
                span.link(failed.clone());
            }
        }
        span
    }

    /// Span of the decision.
    pub(crate) fn decide(&self) -> DecideSpan {
        DecideSpan(self.child("decide", SpanKind::Internal))
    }

    /// Span of a leg.
    pub(crate) fn leg(&self, side: Side, member: &Member) -> SpanHandle {
        let mut span = self.child(side.as_str(), SpanKind::Client);
        if span.is_recording() {
            if let Some(facts) = member.facts() {
                let provider = match facts.engine {
                    Engine::Sglang => "sglang",
                    Engine::Vllm => "vllm",
                };
                span.set(names::GEN_AI_PROVIDER_NAME, provider);
            }
            span.set_later(member.endpoint.clone());
        }
        span
    }
}

impl Tell for Endpoint {
    fn tell(&self, notes: &mut Notes) {
        notes.set("moongate.engine", self.id.to_string());
        let (host, port) = split(self.pool.authority());
        notes.set(names::SERVER_ADDRESS, host.to_owned());
        if let Some(port) = port {
            notes.set(names::SERVER_PORT, i64::from(port));
        }
    }
}

fn split(authority: &str) -> (&str, Option<u16>) {
    match authority.rsplit_once(':') {
        Some((host, port)) => match port.parse() {
            Ok(port) => (host, Some(port)),
            Err(_) => (authority, None),
        },
        None => (authority, None),
    }
}

/// Span of one decision.
pub(crate) struct DecideSpan(SpanHandle);

impl DecideSpan {
    /// Notes what was decided, and ends the span.
    pub(crate) fn decided(mut self, chosen: &Result<Chosen, Refusal>) {
        if !self.0.is_recording() {
            return;
        }
        match chosen {
            Err(refusal) => self.0.error(refusal.to_string()),
            Ok(Chosen { reasons: Some(reasons), .. }) => {
                let (reasons, at) = (reasons.clone(), SystemTime::now());
                self.0.set_later(Arc::new(move |notes: &mut Notes| explain(&reasons, notes, at)));
            }
            Ok(chosen) => self.0.set("moongate.entry", chosen.entry.endpoint.id.to_string()),
        }
    }
}

fn explain(Reasons { decision, fleet }: &Reasons, notes: &mut Notes, at: SystemTime) {
    let name = |ix| fleet.member(ix).map(|member| member.endpoint.id.to_string()).unwrap_or_default();
    let why = &decision.explanation;
    notes.set("moongate.entry", name(decision.route.entry()));
    if let Route::Pair { decode, .. } = decision.route {
        notes.set("moongate.decode", name(decode));
    }
    notes.set("moongate.policy", why.policy.as_str());
    notes.set("moongate.reason", why.reason);
    notes.set("moongate.candidates", i64::try_from(why.candidates.len()).unwrap_or(i64::MAX));
    if let Some(ttft) = decision.predicted_ttft {
        notes.set("moongate.predicted.ttft", ttft);
    }
    let mut by_cost: Vec<usize> = (0..why.candidates.len()).collect();
    by_cost.sort_by(|a, b| why.candidates[*a].cost.total_cmp(&why.candidates[*b].cost));
    for position in by_cost.into_iter().take(MAX_CANDIDATES) {
        let candidate = &why.candidates[position];
        let mut told = vec![
            KeyValue::new("moongate.engine", name(candidate.instance)),
            KeyValue::new("moongate.cost", candidate.cost),
            KeyValue::new("moongate.leading_term", term(candidate.leading_term)),
        ];
        if let Some(terms) = why.terms.get(position) {
            told.extend([
                KeyValue::new("moongate.term.wait", terms.wait),
                KeyValue::new("moongate.term.fetch", terms.fetch),
                KeyValue::new("moongate.term.service", terms.service),
                KeyValue::new("moongate.term.handover", terms.handover),
                KeyValue::new("moongate.term.duplicate", terms.duplicate),
                KeyValue::new("moongate.term.congestion", terms.congestion),
                KeyValue::new("moongate.term.length", terms.length),
                KeyValue::new("moongate.term.decode", terms.decode),
                KeyValue::new("moongate.cached_tokens", i64::from(terms.cached_tokens)),
            ]);
        }
        notes.event("candidate", at, told);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        assert_eq!(split("engine:8000"), ("engine", Some(8000)));
        assert_eq!(split("[::1]:80"), ("[::1]", Some(80)));
        assert_eq!(split("[::1]"), ("[::1]", None));
        assert_eq!(split("engine"), ("engine", None));
    }
}
