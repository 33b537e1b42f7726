//! Wanted replicas, role flips, and why.

use serde::{Deserialize, Serialize};

/// Result of one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlannerDecision {
    /// Time of the input.
    pub time_s: f64,
    pub prefill: RoleDecision,
    pub decode: RoleDecision,
    /// Engines that should change their role instead of being removed from one and created in the other. The wanted
    /// replicas count them in their new role.
    pub flips: RoleFlips,
}

/// Decision about one role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RoleDecision {
    /// Replicas that should be ready or starting. Draining ones are not among them.
    pub wanted: u32,
    pub explanation: RoleExplanation,
}

/// Changes of roles in place. At most one of both is above 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RoleFlips {
    pub prefill_to_decode: u32,
    pub decode_to_prefill: u32,
}

/// What a decision is based on. Values that are not known are `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RoleExplanation {
    /// Ready and starting replicas before the decision.
    pub current: u32,
    /// What determined the number of wanted replicas.
    pub reason: DecisionReason,
    /// Demand now, in tokens per second: prompt tokens to compute for prefill, generated tokens for decode.
    pub demand_tokens_per_s: Option<f64>,
    /// Expected demand at the end of the horizon.
    pub forecast_tokens_per_s: Option<f64>,
    /// Demand up to the end of the horizon that is exceeded only with the probability that the targets allow.
    pub planned_tokens_per_s: Option<f64>,
    /// How far the decision to add replicas looks ahead: the time to start one and to warm its cache, and an interval.
    pub horizon_s: f64,
    /// How long a replica must be superfluous before it is removed: the time for which it would use GPUs without serving
    /// if it were removed and created again.
    pub break_even_s: f64,
    /// Tokens per second of one replica at the targets.
    pub capacity_tokens_per_s: Option<f64>,
    /// Replicas that the planned demand needs, before bounds and hysteresis.
    pub needed: Option<u32>,
    /// Learned share of requests that met the role's target recently.
    pub attained_share: Option<f64>,
    /// Metrics that were missing.
    pub missing: Vec<MissingSignal>,
}

/// What determined a number of replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecisionReason {
    /// The planned demand needs as many as there are.
    Steady,
    /// The planned demand needs more.
    Demand,
    /// Work is queued, or sequences wait, for which the capacity does not suffice in time.
    Backlog,
    /// A latency target is missed, and the demand does not explain it.
    LatencyTarget,
    /// The KV cache limits the batch of a decode engine.
    KvMemory,
    /// Fewer are needed, for longer than the break-even time.
    Surplus,
    /// Fewer are needed, but not for longer than the break-even time.
    BreakEven,
    /// A metric is missing, so that the number is not reduced.
    MissingMetric,
    /// The minimum of the role applies.
    Minimum,
    /// The maximum of the role applies.
    Maximum,
    /// The GPU budget applies.
    GpuBudget,
}

/// A metric that a decision would have used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingSignal {
    /// The tokens per second that are the role's demand. The rate of requests may have replaced it.
    Demand,
    /// Queued prefill work, or waiting sequences.
    Backlog,
    /// What is needed to learn the capacity: computed tokens and the busy share for prefill, the batch and the time per
    /// output token for decode. The last estimate is used.
    Capacity,
    /// The latency, as a percentile or as the share within the target.
    Latency,
}
