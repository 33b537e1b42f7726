//! What a policy answers: a route with its reasons, or a refusal.

use crate::fleet::InstanceIndex;
use crate::policy::PolicyName;
use crate::request::Seconds;

/// The answer for one request.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct RoutingDecision {
    /// Where the request goes.
    pub route: EngineRoute,
    /// What the caller must add to its book until the request ends.
    pub reservation: LoadReservation,
    /// Its place in the engine's own queue, for engines that can be told (SGLang's `priority`): smaller goes first. Expected milliseconds
    /// of computation and a share of the time of arrival by the caller's clock, so that whoever comes later must be ever shorter to
    /// overtake and nobody starves. `None` from policies without an order.
    pub engine_priority: Option<i64>,
    /// Predicted time to first token; `None` from policies that do not predict.
    pub predicted_ttft: Option<Seconds>,
    /// Expected time to first token on the chosen engine from its queue and its learned speed, whatever the policy: how long its
    /// silence means nothing.
    pub expected_ttft: Seconds,
    /// Why.
    pub explanation: DecisionExplanation,
}

/// One or two engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum EngineRoute {
    /// Disaggregated: both engines get the same prompt.
    Pair {
        /// Computes the prompt.
        prefill: InstanceIndex,
        /// Data-parallel rank wanted there, below its `dp_size`.
        prefill_rank: u32,
        /// Generates.
        decode: InstanceIndex,
        /// Data-parallel rank wanted there, below its `dp_size`.
        decode_rank: u32,
    },
    /// A plain worker does both.
    Single {
        /// The worker.
        worker: InstanceIndex,
    },
}

impl EngineRoute {
    /// The engine that computes the prompt.
    #[must_use]
    pub fn prefill_instance(&self) -> InstanceIndex {
        match *self {
            EngineRoute::Pair { prefill, .. } => prefill,
            EngineRoute::Single { worker } => worker,
        }
    }

    /// The engine that generates.
    #[must_use]
    pub fn decode_instance(&self) -> InstanceIndex {
        match *self {
            EngineRoute::Pair { decode, .. } => decode,
            EngineRoute::Single { worker } => worker,
        }
    }
}

/// Load that the request will cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct LoadReservation {
    /// On the entry, until its first token.
    pub prefill_tokens: u64,
    /// On the exit, until it ends.
    pub decode_tokens: u64,
}

/// A decision's reasons, complete enough to be shown to a person and to be replayed.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct DecisionExplanation {
    /// The policy that decided.
    pub policy: PolicyName,
    /// One sentence's worth, from a fixed set.
    pub reason: &'static str,
    /// Entries that were looked at, in the cluster's order; the chosen one is among them.
    pub candidates: Vec<CandidateEngine>,
    /// What the candidates' costs are made of, in their order; empty from policies that do not predict.
    pub terms: Vec<CostBreakdown>,
}

/// The parts of a candidate's cost in seconds. The cost is `max(wait, fetch)` and all others
/// from `service` to `decode`.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct CostBreakdown {
    /// Until the engine is done with what is ahead, held requests that go first included.
    pub wait: Seconds,
    /// Until pages of the shared store are there.
    pub fetch: Seconds,
    /// Computation.
    pub service: Seconds,
    /// KV cache on its way to the decode.
    pub handover: Seconds,
    /// Price of having twice what another engine has.
    pub duplicate: Seconds,
    /// Price of the engine's time for the requests that are held behind.
    pub congestion: Seconds,
    /// Price of computing a prompt of this length where those of another length are.
    pub length: Seconds,
    /// Load of the decode that would take over, and its distance.
    pub decode: Seconds,
    /// Tokens of the prompt that the engine need not compute.
    pub cached_tokens: u32,
}

/// One looked-at entry engine.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct CandidateEngine {
    /// Which.
    pub instance: InstanceIndex,
    /// Smaller is better; the unit is the policy's own (tokens, or seconds).
    pub cost: f64,
    /// The part of the cost that weighed most.
    pub leading_term: CostTerm,
}

/// Parts of a cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum CostTerm {
    /// The policy does not price (rotation).
    None,
    /// Work ahead of this request.
    Backlog,
    /// This request's own computation.
    Service,
    /// Fetching cached pages.
    Fetch,
}

/// Why there is no route.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScheduleRejection {
    /// No instance serves the model at all.
    #[error("no engine serves this model")]
    UnknownModel,
    /// Instances exist, but none can be used now.
    #[error(
        "{prefills} prefill or plain and {decodes} decode engines serve this model, but no usable pair among them is available now"
    )]
    NoneAvailable {
        /// Prefills and plain workers that serve the model.
        prefills: usize,
        /// Decodes that serve the model.
        decodes: usize,
    },
    /// The fleet is too busy to serve the request in time.
    #[error("overloaded; retry after {retry_after:.0} s")]
    Overloaded {
        /// When it is worth asking again.
        retry_after: Seconds,
    },
}
