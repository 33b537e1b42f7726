//! The state machine of one listed instance: when it is probed next, and its current readiness and facts.
//!
//! Pure: callers pass time and jitter, so tests need no waiting.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::kv_transfer::KvTransferMethod;
use crate::listing::ListedInstance;
use crate::probe::options::ProbeOptions;
use crate::probe::report::ProbeVerdict;
use crate::topology::{EngineFacts, EngineInstance, InstanceReadiness};

/// Minimum time between two probes of one instance, independent of the number of requests.
pub(crate) const MIN_PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// The state derived from the last probes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ProbeState {
    /// Not probed since the instance was listed, changed or marked unavailable.
    Unknown,
    Ready,
    /// A vLLM engine that serves, but does not report its KV connector.
    NoConnector(String),
    NotReady(String),
}

#[derive(Debug)]
pub(crate) struct ProbedInstance {
    listed: ListedInstance,
    state: ProbeState,
    facts: Option<EngineFacts>,
    /// Consecutive failed probes: the exponent of the backoff.
    failures: u32,
    due: Instant,
    started: Option<Instant>,
    /// Id of the running probe. Results with another id belong to an earlier listing and are ignored.
    probe_id: Option<u64>,
    /// A probe was requested while one was running, whose result may already be outdated.
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

    /// Applies a newer listing from the source.
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
            // A container that restarted under the same pod UID may be another engine process: probe before it gets traffic again.
            self.state = ProbeState::Unknown;
            self.failures = 0;
            self.probe_id = None;
            self.due = now;
        }
        self.listed = listed;
    }

    /// When the next probe is due; `None` while one runs or the source marks the instance unavailable.
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.probe_id.is_none() && self.listed.unavailable_reason.is_none()).then_some(self.due)
    }

    /// Starts a probe of the returned instance. Its result must carry `probe_id`, which is unique in the process.
    pub(crate) fn start(&mut self, probe_id: u64, now: Instant) -> ListedInstance {
        self.probe_id = Some(probe_id);
        self.reprobe = false;
        self.started = Some(now);
        self.listed.clone()
    }

    /// Schedules a probe now, or after the running one.
    pub(crate) fn request_probe(&mut self, now: Instant) {
        if self.probe_id.is_some() {
            self.reprobe = true;
        } else {
            let earliest = self.started.map_or(now, |started| started + MIN_PROBE_INTERVAL);
            self.due = self.due.min(now.max(earliest));
        }
    }

    /// Applies a probe's result. `jitter` is in 0..1. Returns whether the snapshot may have changed.
    pub(crate) fn finish(
        &mut self,
        probe_id: u64,
        verdict: ProbeVerdict,
        now: Instant,
        jitter: f64,
        options: &ProbeOptions,
    ) -> bool {
        if self.probe_id != Some(probe_id) {
            return false;
        }
        self.probe_id = None;
        let before = (self.state.clone(), self.facts.clone());
        let delay = self.apply_verdict(verdict, jitter, options);
        self.due = now + delay;
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
                // The engine serves, but its connector is unknown: its metrics may report it later.
                options.backoff.max.mul_f64(0.9 + 0.2 * jitter)
            }
            ProbeVerdict::NotReady { reason, facts, timed_out } => {
                self.failures = self.failures.saturating_add(1);
                let was_ready = matches!(self.state, ProbeState::Ready | ProbeState::NoConnector(_));
                if !(timed_out && was_ready && self.failures < options.timeouts_to_unready) {
                    self.state = ProbeState::NotReady(reason);
                    if let Some(facts) = facts {
                        self.update_facts(facts);
                    }
                }
                options.backoff.jittered_pause(self.failures, jitter)
            }
        }
    }

    /// Keeps the known event sources if the engine did not report them this time, so that subscriptions are not dropped.
    fn update_facts(&mut self, mut facts: EngineFacts) {
        facts.events = facts.events.or_else(|| self.facts.take()?.events);
        self.facts = Some(facts);
    }

    /// The instance in the snapshot. `adopted` is a transfer method taken from the prefills of the same model.
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

    /// Whether [`ProbedInstance::instance`] would use an adopted transfer method.
    pub(crate) fn lacks_connector(&self) -> bool {
        matches!(self.state, ProbeState::NoConnector(_))
    }
}

#[cfg(test)]
#[path = "entry_tests.rs"]
mod tests;
