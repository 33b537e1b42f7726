//! The latest decisions, to be asked for afterwards.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use moongate_scheduler::{DecisionSnapshot, EngineRoute, RoutingDecision};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::fleet::FleetSnapshot;

/// As many decisions as are wanted; the oldest makes room.
#[derive(Debug)]
pub(crate) struct DecisionHistory {
    records: Mutex<VecDeque<Arc<DecisionRecord>>>,
    capacity: usize,
}

/// One decision.
#[derive(Debug)]
struct DecisionRecord {
    request_id: String,
    /// Seconds since 1970.
    at: f64,
    queued: Duration,
    decision: RoutingDecision,
    snapshot: DecisionSnapshot,
    /// Engines that were suspect then.
    suspects: Vec<Arc<str>>,
}

impl DecisionHistory {
    /// Keeps `most` decisions; 0 keeps none.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { records: Mutex::default(), capacity }
    }

    /// Whether any are kept.
    pub(crate) fn is_enabled(&self) -> bool {
        self.capacity > 0
    }

    /// Keeps a decision.
    pub(crate) fn push(
        &self,
        request_id: &[u8],
        held: Duration,
        decision: RoutingDecision,
        snapshot: DecisionSnapshot,
        fleet: &FleetSnapshot,
    ) {
        let suspects = fleet.members.iter().filter(|member| member.endpoint.silence.is_suspect());
        let suspects = suspects.map(|member| member.endpoint.id.0.clone()).collect();
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let request_id = String::from_utf8_lossy(request_id).into_owned();
        let decided = Arc::new(DecisionRecord { request_id, at, queued: held, decision, snapshot, suspects });
        let mut latest = self.records.lock();
        while latest.len() >= self.capacity {
            latest.pop_front();
        }
        latest.push_back(decided);
    }

    /// A line for each of the latest decisions, the newest first.
    pub(crate) fn list(&self, most: usize) -> Value {
        let latest: Vec<Arc<DecisionRecord>> = self.records.lock().iter().rev().take(most).cloned().collect();
        latest.iter().map(|decided| decided.summary()).collect()
    }

    /// All decisions for one request, one for each attempt (and sample); `None` if there is none.
    pub(crate) fn get(&self, request_id: &str) -> Option<Value> {
        let found: Vec<Arc<DecisionRecord>> =
            self.records.lock().iter().filter(|decided| decided.request_id == request_id).cloned().collect();
        (!found.is_empty()).then(|| found.iter().map(|decided| decided.details()).collect())
    }
}

impl DecisionRecord {
    fn name(&self, ix: moongate_scheduler::InstanceIndex) -> &str {
        self.snapshot.instances.get(ix.as_usize()).map_or("", |instance| &instance.name)
    }

    fn summary(&self) -> Value {
        let RoutingDecision { route, predicted_ttft, expected_ttft, explanation, .. } = &self.decision;
        let decode = match route {
            EngineRoute::Pair { decode, .. } => Some(self.name(*decode)),
            EngineRoute::Single { .. } => None,
        };
        json!({
            "request_id": self.request_id,
            "at": self.at,
            "held_s": self.queued.as_secs_f64(),
            "policy": explanation.policy,
            "reason": explanation.reason,
            "entry": self.name(route.prefill_instance()),
            "decode": decode,
            "predicted_ttft_s": predicted_ttft,
            "expected_ttft_s": expected_ttft,
            "input_tokens": self.snapshot.request.input_tokens,
        })
    }

    fn details(&self) -> Value {
        let explanation = &self.decision.explanation;
        let candidates: Value = explanation
            .candidates
            .iter()
            .enumerate()
            .map(|(position, candidate)| {
                json!({
                    "instance": self.name(candidate.instance),
                    "cost": candidate.cost,
                    "leading_term": candidate.leading_term,
                    "terms": explanation.terms.get(position),
                    "hits": self.snapshot.prediction.hits(candidate.instance),
                })
            })
            .collect();
        let mut whole = self.summary();
        whole["candidates"] = candidates;
        whole["suspects"] = json!(self.suspects);
        whole["snapshot"] = json!(self.snapshot);
        whole
    }
}
