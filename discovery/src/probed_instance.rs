//! The life of one listed instance: when it is probed next, and what is believed about it meanwhile.
//!
//! Pure: time and jitter are given, so the whole machine is tested without waiting.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::listing::ListedInstance;
use crate::options::ProbeOptions;
use crate::probe::report::ProbeVerdict;
use crate::topology::{EngineFacts, EngineInstance, InstanceReadiness, KvTransferMethod};

/// Least time between two probes of one instance, however often one is asked for.
pub(crate) const MIN_PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// What the last probes amount to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ProbeState {
    /// Not probed since it was listed, changed or held.
    Unknown,
    Ready,
    /// A vLLM engine that serves, but does not say how it moves KV.
    NoConnector(String),
    NotReady(String),
}

#[derive(Debug)]
pub(crate) struct ProbedInstance {
    listed: ListedInstance,
    state: ProbeState,
    facts: Option<EngineFacts>,
    /// Failed probes in a row; the backoff's exponent.
    failures: u32,
    due: Instant,
    started: Option<Instant>,
    /// Of the running probe whose answer counts. Another ticket's answer is about what was listed before.
    probe_id: Option<u64>,
    /// Asked for while a probe was running, whose answer may already be old.
    reprobe: bool,
}

impl ProbedInstance {
    pub(crate) fn new(listed: ListedInstance, now: Instant) -> Self {
        Self {
            listed,
            state: ProbeState::Unknown,
            facts: None,
            failures: 0,
            due: now,
            started: None,
            probe_id: None,
            reprobe: false,
        }
    }

    /// Takes the source's newer word.
    pub(crate) fn update_listing(&mut self, listed: ListedInstance, now: Instant) {
        if self.listed == listed {
            return;
        }
        let other_engine = self.listed.url != listed.url
            || self.listed.role != listed.role
            || self.listed.declared != listed.declared;
        let released = self.listed.unavailable_reason.is_some() && listed.unavailable_reason.is_none();
        if other_engine {
            self.facts = None;
        }
        if other_engine || released {
            // A container that restarted behind one pod UID may be another engine process: ask before trusting again.
            self.state = ProbeState::Unknown;
            self.failures = 0;
            self.probe_id = None;
            self.due = now;
        }
        self.listed = listed;
    }

    /// When the next probe is due; `None` while one runs or the source holds the instance.
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.probe_id.is_none() && self.listed.unavailable_reason.is_none()).then_some(self.due)
    }

    /// A probe starts: what to ask. Its answer must carry `ticket`, which no other probe of the process has.
    pub(crate) fn start(&mut self, ticket: u64, now: Instant) -> ListedInstance {
        self.probe_id = Some(ticket);
        self.reprobe = false;
        self.started = Some(now);
        self.listed.clone()
    }

    /// Somebody wants fresh facts.
    pub(crate) fn request_probe(&mut self, now: Instant) {
        if self.probe_id.is_some() {
            self.reprobe = true;
        } else {
            let earliest = self.started.map_or(now, |started| started + MIN_PROBE_INTERVAL);
            self.due = self.due.min(now.max(earliest));
        }
    }

    /// A probe ended. `jitter` is in 0..1. Answers whether the snapshot may look different now.
    pub(crate) fn finish(
        &mut self,
        ticket: u64,
        verdict: ProbeVerdict,
        now: Instant,
        jitter: f64,
        options: &ProbeOptions,
    ) -> bool {
        if self.probe_id != Some(ticket) {
            return false;
        }
        self.probe_id = None;
        let before = (self.state.clone(), self.facts.clone());
        let wait = self.apply_verdict(verdict, jitter, options);
        self.due = now + wait;
        if self.reprobe {
            self.due = self.due.min(now + MIN_PROBE_INTERVAL);
        }
        before != (self.state.clone(), self.facts.clone())
    }

    fn apply_verdict(&mut self, verdict: ProbeVerdict, jitter: f64, options: &ProbeOptions) -> Duration {
        match verdict {
            ProbeVerdict::Ready(facts) => {
                self.failures = 0;
                self.state = ProbeState::Ready;
                self.update_facts(facts);
                options.refresh.mul_f64(0.9 + 0.2 * jitter)
            }
            ProbeVerdict::NoConnector { facts, reason } => {
                self.failures = 0;
                self.state = ProbeState::NoConnector(reason);
                self.update_facts(facts);
                // Serving, only not classified: its metrics may name the connector later.
                options.backoff_max.mul_f64(0.9 + 0.2 * jitter)
            }
            ProbeVerdict::NotReady { reason, facts, timed_out } => {
                self.failures = self.failures.saturating_add(1);
                let trusted = matches!(self.state, ProbeState::Ready | ProbeState::NoConnector(_));
                if !(timed_out && trusted && self.failures < options.timeouts_to_unready) {
                    self.state = ProbeState::NotReady(reason);
                    if let Some(facts) = facts {
                        self.update_facts(facts);
                    }
                }
                backoff(self.failures, options).mul_f64(0.5 + 0.5 * jitter)
            }
        }
    }

    /// Where events are published stays known while the engine is too busy to say it again: whoever follows them must not lose what he has.
    fn update_facts(&mut self, mut facts: EngineFacts) {
        facts.events = facts.events.or_else(|| self.facts.take()?.events);
        self.facts = Some(facts);
    }

    /// What the gateway sees. `adopted` is a transfer taken from the prefills of the same model.
    pub(crate) fn instance(&self, adopted: Option<KvTransferMethod>) -> Arc<EngineInstance> {
        let mut facts = self.facts.clone();
        let not_ready = |reason: &str| InstanceReadiness::NotReady { reason: reason.to_owned() };
        let readiness = match (&self.listed.unavailable_reason, &self.state) {
            (Some(reason), _) => not_ready(reason),
            (None, ProbeState::Unknown) => not_ready("not probed yet"),
            (None, ProbeState::Ready) => InstanceReadiness::Ready,
            (None, ProbeState::NotReady(reason)) => not_ready(reason),
            (None, ProbeState::NoConnector(reason)) => match (adopted, &mut facts) {
                (Some(transfer), Some(facts)) => {
                    facts.transfer = Some(transfer);
                    InstanceReadiness::Ready
                }
                _ => not_ready(reason),
            },
        };
        Arc::new(EngineInstance {
            id: self.listed.id.clone(),
            role: self.listed.role,
            url: self.listed.url.clone(),
            source: self.listed.source,
            location: self.listed.location.clone(),
            workload: self.listed.workload.clone(),
            declared: self.listed.declared.clone(),
            readiness,
            facts,
        })
    }

    /// Whether [`ProbedInstance::instance`] would use an adopted transfer.
    pub(crate) fn lacks_connector(&self) -> bool {
        matches!(self.state, ProbeState::NoConnector(_))
    }
}

fn backoff(failures: u32, options: &ProbeOptions) -> Duration {
    let doublings = failures.saturating_sub(1).min(20);
    options.backoff_min.saturating_mul(1 << doublings).min(options.backoff_max)
}

#[cfg(test)]
#[path = "entry_tests.rs"]
mod tests;
