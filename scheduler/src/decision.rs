//! Results of a policy: a route with its reasons, or a rejection.

use crate::fleet::InstanceIndex;
use crate::policy::PolicyName;
use crate::seconds::Seconds;

/// Routing decision for one request.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct RoutingDecision {
    /// Engine or pair that gets the request.
    pub route: EngineRoute,
    /// Load that the caller must account for until the request ends.
    pub reservation: LoadReservation,
    /// Priority in the engine's own queue, for engines that accept one (SGLang's `priority`); smaller goes first.
    /// Expected milliseconds of computation plus a share of the arrival time by the caller's clock: the later a request
    /// arrives, the shorter it must be to overtake, so that no request starves. `None` from policies without an order.
    pub engine_priority: Option<i64>,
    /// Predicted time to first token; `None` from policies that do not predict.
    pub predicted_ttft: Option<Seconds>,
    /// Expected time to first token on the chosen engine from its queue and its learned speed, under every policy. An
    /// engine that produces no output for less than this is not suspect.
    pub expected_ttft: Seconds,
    /// Prompt tokens that earlier requests are computing on the engine, and that the request will find there.
    pub pending_tokens: u32,
    /// Reasons for the decision, for operators and for replay.
    pub explanation: DecisionExplanation,
}

/// The one or two engines that serve the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum EngineRoute {
    /// Disaggregated: both engines get the same prompt.
    Pair {
        /// Engine that computes the prompt.
        prefill: InstanceIndex,
        /// Data-parallel rank of the prefill within its engine.
        prefill_rank: u32,
        /// Engine that generates the response.
        decode: InstanceIndex,
        /// Data-parallel rank of the decode within its engine.
        decode_rank: u32,
    },
    /// A plain worker computes the prompt and generates.
    Single {
        worker: InstanceIndex,
        /// Data-parallel rank of the worker within its engine.
        rank: u32,
    },
}

impl EngineRoute {
    /// The engine that computes the prompt.
    #[must_use]
    pub fn prefill_instance(&self) -> InstanceIndex {
        match *self {
            EngineRoute::Pair { prefill, .. } => prefill,
            EngineRoute::Single { worker, .. } => worker,
        }
    }

    /// The engine that generates the response.
    #[must_use]
    pub fn decode_instance(&self) -> InstanceIndex {
        match *self {
            EngineRoute::Pair { decode, .. } => decode,
            EngineRoute::Single { worker, .. } => worker,
        }
    }
}

/// Load that the request adds to its engines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LoadReservation {
    /// Tokens added to the engine that computes the prompt, until its first token.
    pub prefill_tokens: u64,
    /// Tokens added to the engine that generates, until the request ends.
    pub decode_tokens: u64,
}

/// Reasons for a decision, complete enough to display and to replay.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct DecisionExplanation {
    pub policy: PolicyName,
    /// One short sentence from a fixed set.
    pub reason: &'static str,
    /// Prefill engines that were priced, in the cluster's order; the chosen one is among them.
    pub candidates: Vec<CandidateEngine>,
    /// Cost terms of the candidates, in the same order; empty from policies that do not predict.
    pub terms: Vec<CostBreakdown>,
}

/// Cost terms of a candidate in seconds. The cost is `max(wait, fetch)` plus all terms from `service` to `decode`. A load
/// overlaps with the wait, but it also takes time and memory of the engine from others, so it is priced in full.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct CostBreakdown {
    /// Until the engine has finished earlier work, including queued requests that go first.
    pub wait: Seconds,
    /// Until the blocks from the shared store are in the engine's memory.
    pub fetch: Seconds,
    /// Time to compute the uncached tokens.
    pub service: Seconds,
    /// Transfer of the KV cache to the decode engine.
    pub handover: Seconds,
    /// Until the engine, and its decode, have loaded the request's LoRA adapter.
    pub adapter_load: Seconds,
    /// Price of duplicating blocks that another engine already caches.
    pub duplicate: Seconds,
    /// Price of the engine's time for the requests queued behind this one.
    pub congestion: Seconds,
    /// Price of computing a prompt of this length on an engine that serves other lengths.
    pub length: Seconds,
    /// Load of the decode engine that would take over, and its network distance.
    pub decode: Seconds,
    /// Prompt tokens that the engine does not need to compute.
    pub cached_tokens: u32,
}

/// One prefill engine that was priced.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct CandidateEngine {
    /// Position in the cluster's instance list.
    pub instance: InstanceIndex,
    /// Smaller is better; the unit depends on the policy (tokens or seconds).
    pub cost: f64,
    /// The term with the largest share of the cost.
    pub leading_term: CostTerm,
}

/// Terms of a candidate's cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum CostTerm {
    /// The policy does not price candidates (round robin).
    None,
    /// Work ahead of this request.
    Backlog,
    /// Computation of this request itself.
    Service,
    /// Fetching cached blocks from the shared store.
    Fetch,
    /// Loading the request's LoRA adapter.
    AdapterLoad,
}

/// Why no route was chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScheduleRejection {
    /// No instance serves the model.
    #[error("no engine serves this model")]
    UnknownModel,
    /// Instances serve the model, but none is available now.
    #[error(
        "{prefills} prefill or plain and {decodes} decode engines serve this model, but no usable pair among them is available now"
    )]
    NoneAvailable {
        /// Prefills and plain workers that serve the model.
        prefills: usize,
        /// Decodes that serve the model.
        decodes: usize,
    },
    /// The fleet is too busy to meet the request's target.
    #[error("overloaded; retry after {retry_after:.0} s")]
    Overloaded {
        /// Seconds after which a retry should succeed.
        retry_after: Seconds,
    },
}
