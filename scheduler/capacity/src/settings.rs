//! Targets, bounds, budget and first estimates.

use serde::{Deserialize, Serialize};

/// Seconds of a day.
pub(crate) const DAY_S: f64 = 86_400.0;

/// Settings of a [`Planner`](crate::Planner). All times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlannerSettings {
    pub targets: ServiceTargets,
    pub prefill: RoleSettings,
    pub decode: RoleSettings,
    /// When [`RoleSettings::night_min`] replaces [`RoleSettings::min`]; `None` for never.
    pub night: Option<DailyWindow>,
    /// Most GPUs of all wanted replicas; `None` for no limit. Draining replicas do not count.
    pub gpu_budget: Option<u32>,
    /// Whether an engine may change its role without a restart; `None` if it may not.
    pub flip: Option<FlipSettings>,
    /// Time between two steps.
    pub interval_s: f64,
}

/// Latency targets. The share of requests counts requests that meet both.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServiceTargets {
    /// Target of the time to first token.
    pub ttft_s: f64,
    /// Target of the mean time per output token of a request.
    pub tpot_s: f64,
    /// Share of the requests that must meet both targets, between 0 and 1.
    pub share: f64,
}

/// Bounds and first estimates of one role.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RoleSettings {
    /// Fewest replicas.
    pub min: u32,
    /// Most replicas.
    pub max: u32,
    /// Fewest replicas at night; `None` for the same as by day. 0 allows the role to scale to zero while no request
    /// arrives.
    pub night_min: Option<u32>,
    /// GPUs of one replica.
    pub gpus_per_replica: u32,
    /// How long engines of the role take to start, until it has been observed.
    pub start: EngineStart,
    /// Tokens per second of one replica, until they have been observed. Prefill: prompt tokens that a busy engine
    /// computes. Decode: tokens that an engine generates while it just meets the target of the time per output token.
    /// `None` if it is not known: until the capacity has been observed, the role is not scaled down, and only scaled up
    /// for a backlog or a missed target.
    pub first_tokens_per_s: Option<f64>,
}

/// First estimates of how long a replica takes to start and to end. Observed times replace them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineStart {
    /// From the creation of a replica until it is ready.
    pub start_s: f64,
    /// From then on until its cache has the usual hit rate.
    pub warmup_s: f64,
    /// From the decision to remove a replica until its GPUs are free.
    pub drain_s: f64,
}

/// Changing the role of an engine in place.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FlipSettings {
    /// Seconds for which an engine serves nothing while it changes its role, including what it has to drain first.
    pub flip_s: f64,
}

/// A part of each day, in seconds after midnight UTC. It may include midnight: from 79,200 until 21,600.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DailyWindow {
    pub from_s: f64,
    pub until_s: f64,
}

/// Why settings are not accepted.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidSettings {
    #[error("targets.{field} {value}: must be above 0")]
    Target { field: &'static str, value: f64 },
    #[error("targets.share {0}: must be above 0 and below 1")]
    Share(f64),
    #[error("{role}: min {min} exceeds max {max}")]
    Bounds { role: &'static str, min: u32, max: u32 },
    #[error("{role}.gpus_per_replica must be at least 1")]
    NoGpu { role: &'static str },
    #[error("gpu_budget {budget}: the minimum of both roles needs {needed} GPUs")]
    Budget { budget: u32, needed: u64 },
    #[error("{field} {value}: must be a number of seconds, 0 or more")]
    Seconds { field: &'static str, value: f64 },
    #[error("{role}.first_tokens_per_s {value}: must be above 0")]
    Capacity { role: &'static str, value: f64 },
}

impl Default for PlannerSettings {
    fn default() -> Self {
        Self {
            targets: ServiceTargets::default(),
            prefill: RoleSettings::default(),
            decode: RoleSettings::default(),
            night: None,
            gpu_budget: None,
            flip: None,
            interval_s: 10.0,
        }
    }
}

impl Default for ServiceTargets {
    fn default() -> Self {
        Self { ttft_s: 2.0, tpot_s: 0.05, share: 0.95 }
    }
}

impl Default for RoleSettings {
    fn default() -> Self {
        Self {
            min: 1,
            max: 64,
            night_min: None,
            gpus_per_replica: 1,
            start: EngineStart::default(),
            first_tokens_per_s: None,
        }
    }
}

impl Default for EngineStart {
    fn default() -> Self {
        Self { start_s: 120.0, warmup_s: 60.0, drain_s: 30.0 }
    }
}

impl Default for FlipSettings {
    fn default() -> Self {
        Self { flip_s: 10.0 }
    }
}

impl DailyWindow {
    /// Whether the window contains this Unix time.
    #[must_use]
    pub fn contains(self, time_s: f64) -> bool {
        let second = time_s.rem_euclid(DAY_S);
        if self.from_s <= self.until_s {
            (self.from_s..self.until_s).contains(&second)
        } else {
            second >= self.from_s || second < self.until_s
        }
    }
}

impl RoleSettings {
    /// Fewest replicas at this time.
    pub(crate) fn floor(&self, is_night: bool) -> u32 {
        match self.night_min {
            Some(night_min) if is_night => night_min,
            _ => self.min,
        }
    }
}

impl PlannerSettings {
    /// Whether the night's minimum applies.
    #[must_use]
    pub fn is_night(&self, time_s: f64) -> bool {
        self.night.is_some_and(|night| night.contains(time_s))
    }

    /// Checks that the settings do not contradict each other.
    ///
    /// # Errors
    /// A value is out of range, or the minimum exceeds the maximum or the budget.
    pub fn validate(&self) -> Result<(), InvalidSettings> {
        let ServiceTargets { ttft_s, tpot_s, share } = self.targets;
        for (field, value) in [("ttft_s", ttft_s), ("tpot_s", tpot_s)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(InvalidSettings::Target { field, value });
            }
        }
        if !(share > 0.0 && share < 1.0) {
            return Err(InvalidSettings::Share(share));
        }
        seconds("interval_s", self.interval_s)?;
        if let Some(flip) = self.flip {
            seconds("flip.flip_s", flip.flip_s)?;
        }
        if let Some(night) = self.night {
            seconds("night.from_s", night.from_s)?;
            seconds("night.until_s", night.until_s)?;
        }
        let mut needed = 0;
        for (role, bounds) in [("prefill", &self.prefill), ("decode", &self.decode)] {
            bounds.validate(role)?;
            needed +=
                u64::from(bounds.min.max(bounds.night_min.unwrap_or(0))) * u64::from(bounds.gpus_per_replica);
        }
        match self.gpu_budget {
            Some(budget) if u64::from(budget) < needed => Err(InvalidSettings::Budget { budget, needed }),
            _ => Ok(()),
        }
    }
}

impl RoleSettings {
    fn validate(&self, role: &'static str) -> Result<(), InvalidSettings> {
        let min = self.min.max(self.night_min.unwrap_or(0));
        if min > self.max {
            return Err(InvalidSettings::Bounds { role, min, max: self.max });
        }
        if self.gpus_per_replica == 0 {
            return Err(InvalidSettings::NoGpu { role });
        }
        if let Some(value) = self.first_tokens_per_s
            && !(value.is_finite() && value > 0.0)
        {
            return Err(InvalidSettings::Capacity { role, value });
        }
        seconds("start_s", self.start.start_s)?;
        seconds("warmup_s", self.start.warmup_s)?;
        seconds("drain_s", self.start.drain_s)
    }
}

fn seconds(field: &'static str, value: f64) -> Result<(), InvalidSettings> {
    if value.is_finite() && value >= 0.0 { Ok(()) } else { Err(InvalidSettings::Seconds { field, value }) }
}
