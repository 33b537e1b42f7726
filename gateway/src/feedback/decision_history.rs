//! Recent decisions, for `/debug/decisions`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use moongate_scheduler::{DecisionSnapshot, EngineRoute, InstanceIndex, RoutingDecision};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::fleet::{FleetMember, FleetSnapshot};

/// A ring buffer of decisions; the oldest is evicted first.
#[derive(Debug)]
pub(crate) struct DecisionHistory {
    records: Mutex<VecDeque<Arc<DecisionRecord>>>,
    capacity: usize,
}

/// The request of a decision.
#[derive(Debug)]
pub(crate) struct DecidedRequest<'a> {
    pub(crate) id: &'a [u8],
    /// The alias by which the client named the model.
    pub(crate) alias: Option<Arc<str>>,
    /// How long it was queued.
    pub(crate) queued: Duration,
}

/// One decision with its snapshot.
#[derive(Debug)]
struct DecisionRecord {
    request_id: String,
    model: Option<Arc<str>>,
    alias: Option<Arc<str>>,
    /// Seconds since 1970.
    at: f64,
    queued: Duration,
    decision: RoutingDecision,
    snapshot: DecisionSnapshot,
    /// Versions of the chosen engines, in the order of the route.
    versions: Vec<String>,
    /// Engines that were suspect at the time.
    suspects: Vec<Arc<str>>,
    /// Engines that had no partner of their version.
    unpaired: Vec<Arc<str>>,
}

impl DecisionHistory {
    /// Keeps the latest `capacity` decisions; 0 keeps none.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { records: Mutex::default(), capacity }
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.capacity > 0
    }

    pub(crate) fn push(
        &self,
        DecidedRequest { id, alias, queued }: DecidedRequest<'_>,
        decision: RoutingDecision,
        snapshot: DecisionSnapshot,
        fleet: &FleetSnapshot,
    ) {
        let suspects = fleet.members.iter().filter(|member| member.endpoint.silence.is_suspect());
        let suspects = suspects.map(|member| member.name.clone()).collect();
        let version = |ix: InstanceIndex| {
            let facts = fleet.members.get(ix.as_usize()).and_then(FleetMember::facts);
            facts.map_or_else(String::new, |facts| facts.version.clone())
        };
        let versions = match decision.route {
            EngineRoute::Pair { prefill, decode, .. } => vec![version(prefill), version(decode)],
            EngineRoute::Single { worker, .. } => vec![version(worker)],
        };
        let unpaired = fleet.unpaired.iter().map(|id| id.0.clone()).collect();
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let request_id = String::from_utf8_lossy(id).into_owned();
        let model = fleet.model_name(snapshot.request.model).cloned();
        let record = Arc::new(DecisionRecord {
            request_id,
            model,
            alias,
            at,
            queued,
            decision,
            snapshot,
            versions,
            suspects,
            unpaired,
        });
        let mut records = self.records.lock();
        while records.len() >= self.capacity {
            records.pop_front();
        }
        records.push_back(record);
    }

    /// Summaries of the latest decisions, newest first.
    pub(crate) fn list(&self, limit: usize) -> Value {
        let records: Vec<Arc<DecisionRecord>> =
            self.records.lock().iter().rev().take(limit).cloned().collect();
        records.iter().map(|record| record.summary()).collect()
    }

    /// All decisions for one request, one per attempt and sample; `None` if there is none.
    pub(crate) fn get(&self, request_id: &str) -> Option<Value> {
        let found: Vec<Arc<DecisionRecord>> =
            self.records.lock().iter().filter(|record| record.request_id == request_id).cloned().collect();
        (!found.is_empty()).then(|| found.iter().map(|record| record.details()).collect())
    }
}

impl DecisionRecord {
    fn name(&self, ix: InstanceIndex) -> &str {
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
            "model": self.model,
            "alias": self.alias,
            "at": self.at,
            "queue_wait_s": self.queued.as_secs_f64(),
            "policy": explanation.policy,
            "reason": explanation.reason,
            "prefill": self.name(route.prefill_instance()),
            "decode": decode,
            "versions": self.versions,
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
        let mut details = self.summary();
        details["candidates"] = candidates;
        details["suspects"] = json!(self.suspects);
        details["unpaired"] = json!(self.unpaired);
        details["snapshot"] = json!(self.snapshot);
        details
    }
}
