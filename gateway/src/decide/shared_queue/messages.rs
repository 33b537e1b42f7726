//! Messages between a gateway and the one that leads the queue: JSON objects, one per line. Engines and their ranks are named as in the
//! fleet, because gateways number them differently.

use moongate_scheduler::{
    CacheHitPrediction, EngineRoute, InstanceIndex, LoadReservation, RequestProfile, RoutingDecision,
    ScheduleRejection, ScheduleRequest, TierHits,
};
use serde::{Deserialize, Serialize};

use crate::fleet::FleetSnapshot;

/// Limit of [`EngineHits::distance`].
const MAX_DISTANCE: f64 = 100.0;

/// A message about one request of the sender, or a sign of life.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum TicketMessage {
    Alive,
    /// Decide this request.
    Submit(Box<QueueTicket>),
    /// Other engines are excluded for a queued request.
    Exclude {
        ticket: u64,
        excluded: Vec<String>,
    },
    /// The prompt of a sent request has been computed.
    PromptComputed {
        ticket: u64,
        cached_tokens: Option<u32>,
    },
    /// A request has ended, queued or sent.
    End {
        ticket: u64,
        output_tokens: Option<u64>,
    },
}

/// A request as the leader's scheduler needs it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct QueueTicket {
    /// Number of the request, never reused by the same gateway.
    pub(crate) ticket: u64,
    /// Request id, for `moongate explain`.
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) request: RequestProfile,
    /// Seconds that it has already been queued.
    pub(crate) waited: f64,
    /// Whether the response is a stream.
    pub(crate) stream: bool,
    /// Engines with hits, or at another distance than usual.
    pub(crate) hits: Vec<EngineHits>,
    /// Engines that must not be chosen.
    pub(crate) excluded: Vec<String>,
}

/// Predicted cache hits of one engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct EngineHits {
    pub(crate) engine: String,
    #[serde(flatten)]
    pub(crate) hits: TierHits,
    /// Time factor of its fetch from the shared store.
    pub(crate) distance: f64,
}

/// A message from the leader.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum LeaderMessage {
    Alive,
    Send(Box<TicketRoute>),
    Reject { ticket: u64, rejection: TicketRejection },
}

/// Where to send a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TicketRoute {
    pub(crate) ticket: u64,
    pub(crate) prefill: String,
    /// `None` for a plain worker.
    pub(crate) decode: Option<String>,
    pub(crate) reservation: LoadReservation,
    pub(crate) engine_priority: Option<i64>,
    pub(crate) predicted_ttft: Option<f64>,
    pub(crate) expected_ttft: f64,
}

/// Why the leader has no route.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum TicketRejection {
    Overloaded {
        retry_after: f64,
    },
    /// The leader has no engine for the request: it may see another fleet, so the sender decides alone.
    NoRoute,
}

impl EngineHits {
    /// The hits of a prediction for `fleet`.
    pub(crate) fn of_prediction(prediction: &CacheHitPrediction, fleet: &FleetSnapshot) -> Vec<Self> {
        let members = InstanceIndex::all().zip(&fleet.members);
        let hits = members.map(|(ix, member)| Self {
            engine: member.name.to_string(),
            hits: prediction.hits(ix),
            distance: prediction.network_distance(ix),
        });
        hits.filter(|entry| entry.hits.total() > 0).collect()
    }

    /// The prediction for `fleet`. Engines that it does not have are omitted.
    pub(crate) fn to_prediction(entries: &[Self], fleet: &FleetSnapshot) -> CacheHitPrediction {
        let count = fleet.members.len();
        let mut prediction = CacheHitPrediction {
            per_instance: vec![TierHits::default(); count],
            network_distance: vec![1.0; count],
            ..CacheHitPrediction::default()
        };
        for entry in entries {
            if let Some(ix) = fleet.index_of(&entry.engine) {
                prediction.per_instance[ix.as_usize()] = entry.hits;
                prediction.network_distance[ix.as_usize()] = entry.distance.clamp(0.0, MAX_DISTANCE) as f32;
            }
        }
        prediction
    }
}

/// Members of `fleet` with these names.
pub(crate) fn excluded_engines(names: &[String], fleet: &FleetSnapshot) -> Vec<InstanceIndex> {
    names.iter().filter_map(|name| fleet.index_of(name)).collect()
}

/// Names of these members.
pub(crate) fn engine_names(engines: &[InstanceIndex], fleet: &FleetSnapshot) -> Vec<String> {
    let members = engines.iter().filter_map(|ix| fleet.member(*ix));
    members.map(|member| member.name.to_string()).collect()
}

impl QueueTicket {
    /// The request for the scheduler of `fleet`; `None` if no engine there has ever served its model.
    pub(crate) fn schedule_request(&self, fleet: &FleetSnapshot) -> Option<ScheduleRequest> {
        let model = fleet.model(&self.model).ok()?;
        Some(ScheduleRequest {
            request: RequestProfile { model, ..self.request.clone() },
            prediction: EngineHits::to_prediction(&self.hits, fleet),
            excluded: excluded_engines(&self.excluded, fleet),
        })
    }
}

impl TicketRoute {
    /// The message about a decision for `fleet`; `None` if an engine is no longer in it.
    pub(crate) fn new(ticket: u64, decision: &RoutingDecision, fleet: &FleetSnapshot) -> Option<Self> {
        let name = |ix| fleet.member(ix).map(|member| member.name.to_string());
        let (prefill, decode) = match decision.route {
            EngineRoute::Single { worker, .. } => (name(worker)?, None),
            EngineRoute::Pair { prefill, decode, .. } => (name(prefill)?, Some(name(decode)?)),
        };
        Some(Self {
            ticket,
            prefill,
            decode,
            reservation: decision.reservation,
            engine_priority: decision.engine_priority,
            predicted_ttft: decision.predicted_ttft,
            expected_ttft: decision.expected_ttft,
        })
    }

    /// The route in `fleet`; `None` if it lacks an engine.
    pub(crate) fn route(&self, fleet: &FleetSnapshot) -> Option<EngineRoute> {
        let find = |name: &str| {
            let ix = fleet.index_of(name)?;
            Some((ix, fleet.member(ix)?.rank))
        };
        let (prefill, prefill_rank) = find(&self.prefill)?;
        Some(match &self.decode {
            None => EngineRoute::Single { worker: prefill, rank: prefill_rank },
            Some(decode) => {
                let (decode, decode_rank) = find(decode)?;
                EngineRoute::Pair { prefill, prefill_rank, decode, decode_rank }
            }
        })
    }
}

impl From<&ScheduleRejection> for TicketRejection {
    fn from(rejection: &ScheduleRejection) -> Self {
        match rejection {
            ScheduleRejection::Overloaded { retry_after } => Self::Overloaded { retry_after: *retry_after },
            ScheduleRejection::UnknownModel | ScheduleRejection::NoneAvailable { .. } => Self::NoRoute,
        }
    }
}
