//! From what a role needs to the number of replicas that it should have.

use crate::decision::{DecisionReason, RoleDecision, RoleExplanation, RoleFlips};
use crate::settings::RoleSettings;

/// What a role needs, and what it has.
#[derive(Debug)]
pub(crate) struct RolePlan<'a> {
    pub(crate) settings: &'a RoleSettings,
    /// Fewest replicas now.
    pub(crate) floor: u32,
    pub(crate) current: u32,
    pub(crate) ready: u32,
    /// Replicas for the demand until one that is created now could serve; `None` if it is not known.
    pub(crate) needed: Option<u32>,
    /// Replicas for the demand until removing and creating one again would have paid off.
    pub(crate) kept: Option<u32>,
    /// Why more are needed, if they are.
    pub(crate) growth: DecisionReason,
    pub(crate) wanted: u32,
    pub(crate) explanation: RoleExplanation,
}

impl RolePlan<'_> {
    /// Chooses the number of replicas within the bounds of the role.
    pub(crate) fn choose(&mut self) {
        let is_complete = self.explanation.missing.is_empty();
        let (unbounded, reason) = match (self.needed, self.kept) {
            (Some(needed), _) if needed > self.current => (needed, self.growth),
            (Some(_), Some(kept)) if is_complete => match kept {
                kept if kept < self.current => (kept, DecisionReason::Surplus),
                _ if self.needed < Some(self.current) => (self.current, DecisionReason::BreakEven),
                _ => (self.current, DecisionReason::Steady),
            },
            (Some(needed), _) if needed == self.current => (self.current, DecisionReason::Steady),
            _ => (self.current, DecisionReason::MissingMetric),
        };
        self.wanted = unbounded.clamp(self.floor, self.settings.max);
        self.explanation.reason = match self.wanted {
            wanted if wanted > unbounded => DecisionReason::Minimum,
            wanted if wanted < unbounded => DecisionReason::Maximum,
            _ => reason,
        };
    }

    /// Replicas that the demand does not need now.
    fn surplus(&self) -> u32 {
        let Some(needed) = self.needed.filter(|_| self.explanation.missing.is_empty()) else { return 0 };
        self.current.saturating_sub(needed.max(self.floor)).min(self.ready)
    }

    fn gpus(&self) -> u64 {
        u64::from(self.wanted) * u64::from(self.settings.gpus_per_replica)
    }

    pub(crate) fn decision(self) -> RoleDecision {
        RoleDecision { wanted: self.wanted, explanation: self.explanation }
    }
}

/// Lets engines change their role where one role lacks replicas and the other has a surplus.
pub(crate) fn flip(prefill: &mut RolePlan<'_>, decode: &mut RolePlan<'_>) -> RoleFlips {
    if prefill.settings.gpus_per_replica != decode.settings.gpus_per_replica {
        return RoleFlips::default();
    }
    let prefill_to_decode = move_surplus(prefill, decode);
    let decode_to_prefill = if prefill_to_decode == 0 { move_surplus(decode, prefill) } else { 0 };
    RoleFlips { prefill_to_decode, decode_to_prefill }
}

fn move_surplus(from: &mut RolePlan<'_>, to: &RolePlan<'_>) -> u32 {
    let moved = to.wanted.saturating_sub(to.current).min(from.surplus());
    if moved > 0 && from.wanted > from.current - moved {
        from.wanted = from.current - moved;
        from.explanation.reason = DecisionReason::Surplus;
    }
    moved
}

/// Reduces both roles until they fit in the budget: first what would be added, and of both roles the one that keeps the
/// larger part of what it needs.
pub(crate) fn fit_budget<'a>(prefill: &mut RolePlan<'a>, decode: &mut RolePlan<'a>, budget: u32) {
    while prefill.gpus() + decode.gpus() > u64::from(budget) {
        let is_growing = |plan: &RolePlan<'_>| plan.wanted > plan.current.max(plan.floor);
        let is_any_growing = is_growing(prefill) || is_growing(decode);
        let left = |plan: &RolePlan<'_>| {
            let can_shrink = if is_any_growing { is_growing(plan) } else { plan.wanted > plan.floor };
            let needed = f64::from(plan.needed.unwrap_or(plan.wanted).max(1));
            can_shrink.then(|| f64::from(plan.wanted - 1) / needed)
        };
        let reduced = match (left(prefill), left(decode)) {
            (Some(one), Some(other)) if one >= other => &mut *prefill,
            (Some(_), None) => &mut *prefill,
            (_, Some(_)) => &mut *decode,
            (None, None) => return,
        };
        reduced.wanted -= 1;
        reduced.explanation.reason = DecisionReason::GpuBudget;
    }
}
