//! The life of one listed instance: when it is probed next, and what is believed about it meanwhile.
//!
//! Pure: time and jitter are given, so the whole machine is tested without waiting.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::listing::Listed;
use crate::options::ProbeOptions;
use crate::probe::report::Verdict;
use crate::topology::{EngineFacts, Instance, KvTransfer, Readiness};

/// Least time between two probes of one instance, however often one is asked for.
pub(crate) const MIN_PROBE_GAP: Duration = Duration::from_millis(100);

/// What the last probes amount to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Belief {
    /// Not probed since it was listed, changed or held.
    Unknown,
    Ready,
    /// A vLLM engine that serves, but does not say how it moves KV.
    NoConnector(String),
    NotReady(String),
}

#[derive(Debug)]
pub(crate) struct Entry {
    listed: Listed,
    belief: Belief,
    facts: Option<EngineFacts>,
    /// Failed probes in a row; the backoff's exponent.
    failures: u32,
    due: Instant,
    started: Option<Instant>,
    /// Of the running probe whose answer counts. Another ticket's answer is about what was listed before.
    ticket: Option<u64>,
    /// Asked for while a probe was running, whose answer may already be old.
    again: bool,
}

impl Entry {
    pub(crate) fn new(listed: Listed, now: Instant) -> Self {
        Self {
            listed,
            belief: Belief::Unknown,
            facts: None,
            failures: 0,
            due: now,
            started: None,
            ticket: None,
            again: false,
        }
    }

    /// Takes the source's newer word.
    pub(crate) fn relist(&mut self, listed: Listed, now: Instant) {
        if self.listed == listed {
            return;
        }
        let other_engine = self.listed.url != listed.url
            || self.listed.role != listed.role
            || self.listed.declared != listed.declared;
        let released = self.listed.held.is_some() && listed.held.is_none();
        if other_engine {
            self.facts = None;
        }
        if other_engine || released {
            // A container that restarted behind one pod UID may be another engine process: ask before trusting again.
            self.belief = Belief::Unknown;
            self.failures = 0;
            self.ticket = None;
            self.due = now;
        }
        self.listed = listed;
    }

    /// When the next probe is due; `None` while one runs or the source holds the instance.
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.ticket.is_none() && self.listed.held.is_none()).then_some(self.due)
    }

    /// A probe starts: what to ask. Its answer must carry `ticket`, which no other probe of the process has.
    pub(crate) fn start(&mut self, ticket: u64, now: Instant) -> Listed {
        self.ticket = Some(ticket);
        self.again = false;
        self.started = Some(now);
        self.listed.clone()
    }

    /// Somebody wants fresh facts.
    pub(crate) fn ask(&mut self, now: Instant) {
        if self.ticket.is_some() {
            self.again = true;
        } else {
            let earliest = self.started.map_or(now, |started| started + MIN_PROBE_GAP);
            self.due = self.due.min(now.max(earliest));
        }
    }

    /// A probe ended. `jitter` is in 0..1. Answers whether the snapshot may look different now.
    pub(crate) fn finish(
        &mut self,
        ticket: u64,
        verdict: Verdict,
        now: Instant,
        jitter: f64,
        options: &ProbeOptions,
    ) -> bool {
        if self.ticket != Some(ticket) {
            return false;
        }
        self.ticket = None;
        let before = (self.belief.clone(), self.facts.clone());
        let wait = self.believe(verdict, jitter, options);
        self.due = now + wait;
        if self.again {
            self.due = self.due.min(now + MIN_PROBE_GAP);
        }
        before != (self.belief.clone(), self.facts.clone())
    }

    fn believe(&mut self, verdict: Verdict, jitter: f64, options: &ProbeOptions) -> Duration {
        match verdict {
            Verdict::Ready(facts) => {
                self.failures = 0;
                self.belief = Belief::Ready;
                self.learn(facts);
                options.refresh.mul_f64(0.9 + 0.2 * jitter)
            }
            Verdict::NoConnector { facts, reason } => {
                self.failures = 0;
                self.belief = Belief::NoConnector(reason);
                self.learn(facts);
                // Serving, only not classified: its metrics may name the connector later.
                options.backoff_max.mul_f64(0.9 + 0.2 * jitter)
            }
            Verdict::NotReady { reason, facts, timed_out } => {
                self.failures = self.failures.saturating_add(1);
                let trusted = matches!(self.belief, Belief::Ready | Belief::NoConnector(_));
                if !(timed_out && trusted && self.failures < options.timeouts_to_unready) {
                    self.belief = Belief::NotReady(reason);
                    if let Some(facts) = facts {
                        self.learn(facts);
                    }
                }
                backoff(self.failures, options).mul_f64(0.5 + 0.5 * jitter)
            }
        }
    }

    /// Where events are published stays known while the engine is too busy to say it again: whoever follows them must not lose what he has.
    fn learn(&mut self, mut facts: EngineFacts) {
        facts.events = facts.events.or_else(|| self.facts.take()?.events);
        self.facts = Some(facts);
    }

    /// What the gateway sees. `adopted` is a transfer taken from the prefills of the same model.
    pub(crate) fn instance(&self, adopted: Option<KvTransfer>) -> Arc<Instance> {
        let mut facts = self.facts.clone();
        let not_ready = |reason: &str| Readiness::NotReady { reason: reason.to_owned() };
        let readiness = match (&self.listed.held, &self.belief) {
            (Some(reason), _) => not_ready(reason),
            (None, Belief::Unknown) => not_ready("not probed yet"),
            (None, Belief::Ready) => Readiness::Ready,
            (None, Belief::NotReady(reason)) => not_ready(reason),
            (None, Belief::NoConnector(reason)) => match (adopted, &mut facts) {
                (Some(transfer), Some(facts)) => {
                    facts.transfer = Some(transfer);
                    Readiness::Ready
                }
                _ => not_ready(reason),
            },
        };
        Arc::new(Instance {
            id: self.listed.id.clone(),
            role: self.listed.role,
            url: self.listed.url.clone(),
            source: self.listed.source,
            place: self.listed.place.clone(),
            workload: self.listed.workload.clone(),
            declared: self.listed.declared.clone(),
            readiness,
            facts,
        })
    }

    /// Whether [`Entry::instance`] would use an adopted transfer.
    pub(crate) fn lacks_connector(&self) -> bool {
        matches!(self.belief, Belief::NoConnector(_))
    }
}

fn backoff(failures: u32, options: &ProbeOptions) -> Duration {
    let doublings = failures.saturating_sub(1).min(20);
    options.backoff_min.saturating_mul(1 << doublings).min(options.backoff_max)
}

#[cfg(test)]
#[path = "entry_tests.rs"]
mod tests;
