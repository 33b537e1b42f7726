//! What is observed in one interval. Every metric may be missing; a missing one never reduces the number of replicas.

use serde::{Deserialize, Serialize};

/// Input of one step of a [`Planner`](crate::Planner). Rates and shares are means over the time since the previous step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PlannerInput {
    /// Unix time in seconds. The daily tide is learned by its remainder of 86,400.
    pub time_s: f64,
    /// Requests per second that arrived at the gateways, including those that are held in their queues. It replaces the
    /// demand of a role whose own metric is missing.
    pub requests_per_s: Option<f64>,
    pub prefill_replicas: RoleReplicas,
    pub decode_replicas: RoleReplicas,
    pub prefill: PrefillSignals,
    pub decode: DecodeSignals,
}

/// Replicas of one role.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RoleReplicas {
    /// Replicas that accept requests.
    pub ready: u32,
    /// Replicas that have been created, but are not ready.
    pub starting: Vec<StartingReplica>,
    /// Replicas that accept no further requests and end when they are idle.
    pub draining: u32,
    /// Replicas among `ready` that became ready recently, for how long caches take to warm. Empty if it is not known.
    pub warming: Vec<WarmingReplica>,
}

/// A replica that is not ready.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StartingReplica {
    /// Unix time of its creation in seconds. Must not change between steps: replicas are recognized by it.
    pub since_s: f64,
}

/// A replica that became ready recently.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WarmingReplica {
    /// Unix time at which it became ready, in seconds. Must not change between steps.
    pub ready_since_s: f64,
    /// Share of its prompt tokens that its cache had.
    pub cache_hit_share: f64,
}

/// Metrics of the prefill role.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefillSignals {
    /// Prompt tokens per second of arriving requests that have to be computed, after cache hits. The demand of the role.
    pub arriving_tokens_per_s: Option<f64>,
    /// Prompt tokens per second that the engines have computed.
    pub computed_tokens_per_s: Option<f64>,
    /// Share of the time in which the ready engines were computing, between 0 and 1: a mean over them.
    pub busy_share: Option<f64>,
    /// Computation that is held at the gateways or queued in the engines, in seconds of one engine.
    pub queued_work_s: Option<f64>,
    /// Share of prompt tokens that caches had, between 0 and 1.
    pub cache_hit_share: Option<f64>,
    /// Time to first token at the target's share: its 95th percentile for a share of 0.95.
    pub ttft_s: Option<f64>,
    /// Share of the requests whose first token arrived within the target.
    pub within_target_share: Option<f64>,
}

/// Metrics of the decode role.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DecodeSignals {
    /// Tokens per second that the engines have generated. The demand of the role, as long as it is not overloaded.
    pub generated_tokens_per_s: Option<f64>,
    /// Sequences that all engines generate: a mean over the interval.
    pub running: Option<f64>,
    /// Sequences that wait for capacity of a decode engine.
    pub waiting: Option<f64>,
    /// Share of the KV cache of the ready engines that is occupied, between 0 and 1: a mean over them.
    pub kv_occupancy: Option<f64>,
    /// Time per output token at the target's share: its 95th percentile for a share of 0.95.
    pub tpot_s: Option<f64>,
    /// Share of the requests whose mean time per output token met the target.
    pub within_target_share: Option<f64>,
}

impl PlannerInput {
    /// An input without any replica or metric.
    #[must_use]
    pub fn at(time_s: f64) -> Self {
        Self { time_s, ..Self::default() }
    }
}

impl RoleReplicas {
    /// Replicas that are ready and nothing else.
    #[must_use]
    pub fn ready(ready: u32) -> Self {
        Self { ready, ..Self::default() }
    }

    /// Replicas that are ready or will be.
    #[must_use]
    pub fn current(&self) -> u32 {
        self.ready.saturating_add(u32::try_from(self.starting.len()).unwrap_or(u32::MAX))
    }
}
