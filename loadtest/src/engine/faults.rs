//! Fault injection for engines, switched at run time.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "fault")]
pub enum EngineFault {
    #[default]
    None,
    /// Simulates a dead process: both listeners closed, connections reset.
    Refuse,
    /// Accepts the request and never responds.
    Hang,
    Status500,
    /// Responds with status 404, as for an unknown path.
    NotFound,
    /// Closes the connection after the request was read and before the response starts.
    CloseBeforeFirstByte,
    /// Closes the connection after this many tokens, without the end of the body.
    DisconnectMidStream {
        /// Tokens sent before the fault.
        tokens: u64,
    },
    /// Sends no more data after this many tokens, with the connection open.
    HangMidStream {
        /// Tokens sent before the fault.
        tokens: u64,
    },
    /// Responds with bytes that are not HTTP.
    Garbage,
    /// Responds with status 200 and a body that is neither JSON nor an event stream.
    GarbageBody,
    Slow {
        /// Multiplier of all durations of the engine.
        factor: f64,
    },
    /// A stream's first event is an error, as SGLang reports a failure after the response head was sent. A request
    /// without streaming gets 500.
    SseError,
}

/// A fault and the requests that it affects.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct EngineFaultPlan {
    #[serde(flatten)]
    pub fault: EngineFault,
    /// Whether it also affects requests that do not generate (health, metrics, models). [`EngineFault::Refuse`] always
    /// affects all requests.
    #[serde(default)]
    pub all_endpoints: bool,
    /// Whether it affects tokenization requests (`/tokenize`, `…/render`) instead of generation.
    #[serde(default)]
    pub tokenize_only: bool,
    /// Number of affected requests until the fault ends; `None` is no limit.
    #[serde(default)]
    pub times: Option<u32>,
    /// The fault ends after this many milliseconds; `None` is never. For [`EngineFault::Refuse`] set over HTTP, this is
    /// the only way to end it.
    #[serde(default)]
    pub duration_ms: Option<u64>,
}

/// Kinds of requests that a fault plan distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultScope {
    Generation,
    Tokenization,
    Other,
}

impl EngineFaultPlan {
    fn applies_to(&self, scope: FaultScope) -> bool {
        match scope {
            FaultScope::Generation => !self.tokenize_only || self.all_endpoints,
            FaultScope::Tokenization => self.tokenize_only || self.all_endpoints,
            FaultScope::Other => self.all_endpoints,
        }
    }
}

impl From<EngineFault> for EngineFaultPlan {
    fn from(fault: EngineFault) -> Self {
        Self { fault, ..Self::default() }
    }
}

/// Faults of an engine's KV event stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KvEventFault {
    /// Of this many messages the last one is dropped; 0 drops none.
    DropEvery(u64),
    /// Empties the cache and restarts numbering at 0, as a process restart does.
    Restart(bool),
}

/// Current fault plan of an engine.
#[derive(Debug, Default)]
pub(crate) struct EngineFaultInjector {
    plan: Mutex<EngineFaultPlan>,
}

impl EngineFaultInjector {
    pub(crate) fn set(&self, plan: EngineFaultPlan) {
        *self.plan.lock() = plan;
    }

    /// Clears the plan unless another one has replaced it.
    pub(crate) fn clear_if_current(&self, expected: EngineFaultPlan) -> bool {
        let mut plan = self.plan.lock();
        let same = plan.fault == expected.fault && plan.duration_ms == expected.duration_ms;
        if same {
            *plan = EngineFaultPlan::default();
        }
        same
    }

    /// Fault of the next request; counts down `times`.
    pub(crate) fn next_fault(&self, scope: FaultScope) -> EngineFault {
        let mut plan = self.plan.lock();
        if !plan.applies_to(scope) {
            return EngineFault::None;
        }
        let fault = plan.fault;
        if let Some(left) = &mut plan.times {
            *left = left.saturating_sub(1);
            if *left == 0 {
                *plan = EngineFaultPlan::default();
            }
        }
        fault
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_reads_from_json_and_runs_out() {
        let plan: EngineFaultPlan =
            serde_json::from_str(r#"{"fault":"disconnect_mid_stream","tokens":3,"times":2}"#)
                .expect("a plan");
        let switch = EngineFaultInjector::default();
        switch.set(plan);
        assert_eq!(switch.next_fault(FaultScope::Other), EngineFault::None);
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::DisconnectMidStream { tokens: 3 });
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::DisconnectMidStream { tokens: 3 });
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::None);
    }

    #[test]
    fn tokenize_fault_does_not_affect_generation() {
        let switch = EngineFaultInjector::default();
        switch.set(EngineFaultPlan { tokenize_only: true, ..EngineFault::NotFound.into() });
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::None);
        assert_eq!(switch.next_fault(FaultScope::Other), EngineFault::None);
        assert_eq!(switch.next_fault(FaultScope::Tokenization), EngineFault::NotFound);
        switch.set(EngineFault::NotFound.into());
        assert_eq!(switch.next_fault(FaultScope::Tokenization), EngineFault::None);
    }

    #[test]
    fn event_faults_read_from_json() {
        let read = |text| serde_json::from_str::<KvEventFault>(text).ok();
        assert_eq!(read(r#"{"drop_every":3}"#), Some(KvEventFault::DropEvery(3)));
        assert_eq!(read(r#"{"restart":true}"#), Some(KvEventFault::Restart(true)));
        assert_eq!(read("{}"), None);
    }

    #[test]
    fn expired_timer_does_not_clear_a_newer_plan() {
        let switch = EngineFaultInjector::default();
        let old = EngineFaultPlan { duration_ms: Some(5), ..EngineFault::Hang.into() };
        switch.set(old);
        switch.set(EngineFault::Status500.into());
        assert!(!switch.clear_if_current(old));
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::Status500);
    }
}
