//! The latest decisions, to be asked for afterwards.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use moongate_scheduler::{Decision, Route, Snapshot};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::fleet::Fleet;

/// As many decisions as are wanted; the oldest makes room.
#[derive(Debug)]
pub(crate) struct Decisions {
    latest: Mutex<VecDeque<Arc<Decided>>>,
    most: usize,
}

/// One decision.
#[derive(Debug)]
struct Decided {
    request_id: String,
    /// Seconds since 1970.
    at: f64,
    held: Duration,
    decision: Decision,
    snapshot: Snapshot,
    /// Engines that were suspect then.
    suspects: Vec<Arc<str>>,
}

impl Decisions {
    /// Keeps `most` decisions; 0 keeps none.
    pub(crate) fn new(most: usize) -> Self {
        Self { latest: Mutex::default(), most }
    }

    /// Whether any are kept.
    pub(crate) fn are_kept(&self) -> bool {
        self.most > 0
    }

    /// Keeps a decision.
    pub(crate) fn keep(
        &self,
        request_id: &[u8],
        held: Duration,
        decision: Decision,
        snapshot: Snapshot,
        fleet: &Fleet,
    ) {
        let suspects = fleet.members.iter().filter(|member| member.endpoint.silence.is_suspect());
        let suspects = suspects.map(|member| member.endpoint.id.0.clone()).collect();
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let request_id = String::from_utf8_lossy(request_id).into_owned();
        let decided = Arc::new(Decided { request_id, at, held, decision, snapshot, suspects });
        let mut latest = self.latest.lock();
        while latest.len() >= self.most {
            latest.pop_front();
        }
        latest.push_back(decided);
    }

    /// A line for each of the latest decisions, the newest first.
    pub(crate) fn list(&self, most: usize) -> Value {
        let latest: Vec<Arc<Decided>> = self.latest.lock().iter().rev().take(most).cloned().collect();
        latest.iter().map(|decided| decided.summary()).collect()
    }

    /// All decisions for one request, one for each attempt (and sample); `None` if there is none.
    pub(crate) fn of(&self, request_id: &str) -> Option<Value> {
        let found: Vec<Arc<Decided>> =
            self.latest.lock().iter().filter(|decided| decided.request_id == request_id).cloned().collect();
        (!found.is_empty()).then(|| found.iter().map(|decided| decided.whole()).collect())
    }
}

impl Decided {
    fn name(&self, ix: moongate_scheduler::InstanceIx) -> &str {
        self.snapshot.instances.get(ix.at()).map_or("", |instance| &instance.name)
    }

    fn summary(&self) -> Value {
        let Decision { route, predicted_ttft, expected_ttft, explanation, .. } = &self.decision;
        let decode = match route {
            Route::Pair { decode, .. } => Some(self.name(*decode)),
            Route::Single { .. } => None,
        };
        json!({
            "request_id": self.request_id,
            "at": self.at,
            "held_s": self.held.as_secs_f64(),
            "policy": explanation.policy,
            "reason": explanation.reason,
            "entry": self.name(route.entry()),
            "decode": decode,
            "predicted_ttft_s": predicted_ttft,
            "expected_ttft_s": expected_ttft,
            "input_tokens": self.snapshot.request.input_tokens,
        })
    }

    fn whole(&self) -> Value {
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
