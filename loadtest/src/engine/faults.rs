//! Ways in which an engine can be made to fail, switched at run time.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// One way to fail.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "fault")]
pub enum EngineFault {
    /// Works.
    #[default]
    None,
    /// The process is gone: both listeners closed, connections reset.
    Refuse,
    /// Takes the request and never answers.
    Hang,
    /// Answers 500.
    Status500,
    /// Answers 404, as for a path that it does not have.
    NotFound,
    /// Closes the connection after the request was read and before anything was answered.
    CloseBeforeFirstByte,
    /// Closes the connection after this many tokens, without the end of the body.
    DieMidStream {
        /// Tokens sent before.
        tokens: u64,
    },
    /// Falls silent after this many tokens.
    HangMidStream {
        /// Tokens sent before.
        tokens: u64,
    },
    /// Answers bytes that are not HTTP.
    Garbage,
    /// Answers 200 with a body that is neither JSON nor a stream of events.
    GarbageBody,
    /// Everything takes this many times longer.
    Slow {
        /// The factor.
        factor: f64,
    },
    /// A stream's first event is an error, as SGLang reports a failure after the head was sent. A request
    /// without streaming gets 500.
    SseError,
}

/// A fault and whom it meets.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct EngineFaultPlan {
    /// What happens.
    #[serde(flatten)]
    pub fault: EngineFault,
    /// Whether it also meets requests that do not generate (health, metrics, models). [`EngineFault::Refuse`] meets
    /// everything in any case.
    #[serde(default)]
    pub everywhere: bool,
    /// Whether it meets questions for a prompt's tokens (`/tokenize`, `…/render`) instead of requests that generate.
    #[serde(default)]
    pub tokenize: bool,
    /// How many requests it meets before the engine works again; `None` is all.
    #[serde(default)]
    pub times: Option<u32>,
    /// The engine works again after this many milliseconds; `None` is never. The only way back from
    /// [`EngineFault::Refuse`] that is set over HTTP.
    #[serde(default)]
    pub for_ms: Option<u64>,
}

/// What a request wants, as far as faults tell requests apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultScope {
    Generation,
    /// The tokens of a prompt.
    Tokenization,
    Other,
}

impl EngineFaultPlan {
    fn applies_to(&self, wants: FaultScope) -> bool {
        match wants {
            FaultScope::Generation => !self.tokenize || self.everywhere,
            FaultScope::Tokenization => self.tokenize || self.everywhere,
            FaultScope::Other => self.everywhere,
        }
    }
}

impl From<EngineFault> for EngineFaultPlan {
    fn from(fault: EngineFault) -> Self {
        Self { fault, ..Self::default() }
    }
}

/// What goes wrong with an engine's KV events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KvEventFault {
    /// Of so many messages the last one is lost; 0 loses none.
    LoseEvery(u64),
    /// The cache is empty and messages count from 0 again, as after a restart of the process.
    Restart(bool),
}

/// The engine's switch.
#[derive(Debug, Default)]
pub(crate) struct EngineFaultInjector {
    plan: Mutex<EngineFaultPlan>,
}

impl EngineFaultInjector {
    pub(crate) fn set(&self, plan: EngineFaultPlan) {
        *self.plan.lock() = plan;
    }

    /// Sets the plan back unless another one has replaced it.
    pub(crate) fn clear_if_current(&self, expected: EngineFaultPlan) -> bool {
        let mut plan = self.plan.lock();
        let same = plan.fault == expected.fault && plan.for_ms == expected.for_ms;
        if same {
            *plan = EngineFaultPlan::default();
        }
        same
    }

    /// What happens to the next request.
    pub(crate) fn next_fault(&self, wants: FaultScope) -> EngineFault {
        let mut plan = self.plan.lock();
        if !plan.applies_to(wants) {
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
            serde_json::from_str(r#"{"fault":"die_mid_stream","tokens":3,"times":2}"#).expect("a plan");
        let switch = EngineFaultInjector::default();
        switch.set(plan);
        assert_eq!(switch.next_fault(FaultScope::Other), EngineFault::None);
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::DieMidStream { tokens: 3 });
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::DieMidStream { tokens: 3 });
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::None);
    }

    #[test]
    fn a_fault_of_tokenizing_spares_what_generates() {
        let switch = EngineFaultInjector::default();
        switch.set(EngineFaultPlan { tokenize: true, ..EngineFault::NotFound.into() });
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::None);
        assert_eq!(switch.next_fault(FaultScope::Other), EngineFault::None);
        assert_eq!(switch.next_fault(FaultScope::Tokenization), EngineFault::NotFound);
        switch.set(EngineFault::NotFound.into());
        assert_eq!(switch.next_fault(FaultScope::Tokenization), EngineFault::None);
    }

    #[test]
    fn event_faults_read_from_json() {
        let read = |text| serde_json::from_str::<KvEventFault>(text).ok();
        assert_eq!(read(r#"{"lose_every":3}"#), Some(KvEventFault::LoseEvery(3)));
        assert_eq!(read(r#"{"restart":true}"#), Some(KvEventFault::Restart(true)));
        assert_eq!(read("{}"), None);
    }

    #[test]
    fn a_late_timer_leaves_a_newer_plan_alone() {
        let switch = EngineFaultInjector::default();
        let old = EngineFaultPlan { for_ms: Some(5), ..EngineFault::Hang.into() };
        switch.set(old);
        switch.set(EngineFault::Status500.into());
        assert!(!switch.clear_if_current(old));
        assert_eq!(switch.next_fault(FaultScope::Generation), EngineFault::Status500);
    }
}
