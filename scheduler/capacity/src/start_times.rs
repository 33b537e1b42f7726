//! How long replicas take to start, to warm their caches and to drain: learned from what is observed.

use serde::{Deserialize, Serialize};

use crate::input::RoleReplicas;
use crate::settings::EngineStart;

/// Weight of a new observation.
const SAMPLE_WEIGHT: f64 = 0.3;
/// A cache is warm when its hit share is this part of the role's.
const WARM_PART: f64 = 0.8;
/// Weight of one interval in the hit share of a replica.
const HIT_WEIGHT: f64 = 0.3;
/// A replica that is not warm after so long is not waited for.
const MAX_WARMUP_S: f64 = 1_800.0;
/// Drained replicas after which their mean counts, and how fast earlier ones fade.
const MIN_DRAINED: f64 = 3.0;
const DRAIN_FADE: f64 = 0.99;

/// Learned times of one role.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct StartTimes {
    start_s: Option<f64>,
    warmup_s: Option<f64>,
    /// Replicas that were starting or ready at the last step.
    starting_since: Vec<f64>,
    ready: Option<u32>,
    /// Replicas whose caches are not warm: when they became ready, and their hit share.
    cold: Vec<ColdReplica>,
    /// Seconds of draining replicas, and their number.
    drain_s: f64,
    drained: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct ColdReplica {
    ready_since_s: f64,
    hit_share: f64,
}

fn learn(estimate: &mut Option<f64>, sample: f64) {
    *estimate = Some(estimate.map_or(sample, |known| known + SAMPLE_WEIGHT * (sample - known)));
}

impl StartTimes {
    pub(crate) fn record(
        &mut self,
        time_s: f64,
        step_s: f64,
        replicas: &RoleReplicas,
        hit_share: Option<f64>,
    ) {
        let now: Vec<f64> = replicas.starting.iter().map(|replica| replica.since_s).collect();
        let ready_before = self.ready.replace(replicas.ready);
        let mut gone = std::mem::take(&mut self.starting_since);
        for since_s in &now {
            if let Some(position) = gone.iter().position(|before| before == since_s) {
                gone.swap_remove(position);
            }
        }
        gone.sort_by(f64::total_cmp);
        if let Some(before) = ready_before {
            // Replicas that vanished without becoming ready were removed.
            let became_ready = replicas.ready.saturating_sub(before) as usize;
            for since_s in gone.iter().take(became_ready) {
                learn(&mut self.start_s, (time_s - since_s - step_s / 2.0).max(0.0));
            }
            self.drain_s = DRAIN_FADE * self.drain_s + step_s * f64::from(replicas.draining);
            self.drained = DRAIN_FADE * self.drained + f64::from(before.saturating_sub(replicas.ready));
        }
        self.starting_since = now;
        self.record_warming(time_s, replicas, hit_share);
    }

    fn record_warming(&mut self, time_s: f64, replicas: &RoleReplicas, hit_share: Option<f64>) {
        let Some(role_share) = hit_share.filter(|&share| share > 0.0) else { return };
        for replica in &replicas.warming {
            let age_s = time_s - replica.ready_since_s;
            let known = self.cold.iter_mut().find(|cold| cold.ready_since_s == replica.ready_since_s);
            if let Some(cold) = known {
                cold.hit_share += HIT_WEIGHT * (replica.cache_hit_share - cold.hit_share);
                if cold.hit_share >= WARM_PART * role_share {
                    learn(&mut self.warmup_s, age_s.clamp(0.0, MAX_WARMUP_S));
                    cold.hit_share = f64::INFINITY;
                }
            } else if age_s < 30.0 {
                self.cold.push(ColdReplica { ready_since_s: replica.ready_since_s, hit_share: 0.0 });
            }
        }
        self.cold.retain(|cold| cold.hit_share.is_finite() && time_s - cold.ready_since_s < MAX_WARMUP_S);
    }

    /// The estimates: what has been observed, and otherwise what is configured. A replica that has been starting for
    /// longer than usual raises the estimate.
    pub(crate) fn estimate(&self, configured: EngineStart, time_s: f64) -> EngineStart {
        let start_s = self.start_s.unwrap_or(configured.start_s);
        let oldest_s = self.starting_since.iter().map(|since_s| time_s - since_s).fold(0.0, f64::max);
        let drain_s =
            if self.drained >= MIN_DRAINED { self.drain_s / self.drained } else { configured.drain_s };
        EngineStart {
            start_s: start_s.max(oldest_s.min(10.0 * (start_s + 60.0))),
            warmup_s: self.warmup_s.unwrap_or(configured.warmup_s),
            drain_s,
        }
    }
}
