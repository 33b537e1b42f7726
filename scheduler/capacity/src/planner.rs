//! One step, and the state that survives a restart.

use serde::{Deserialize, Serialize};

use crate::decision::{DecisionReason, MissingSignal, PlannerDecision, RoleExplanation, RoleFlips};
use crate::decode_capacity::DecodeCapacity;
use crate::error_budget::ErrorBudget;
use crate::forecast::DemandForecast;
use crate::input::{PlannerInput, RoleReplicas};
use crate::prefill_capacity::{NEGLIGIBLE, PrefillCapacity};
use crate::recent_needs::RecentNeeds;
use crate::role_plan::{RolePlan, fit_budget, flip};
use crate::settings::{InvalidSettings, PlannerSettings, RoleSettings};
use crate::start_times::StartTimes;

/// Longest time between two steps that counts, in seconds: after a pause the last values are as old as one step.
const MAX_STEP_S: f64 = 60.0;
/// Part of the target that queued work may take before it counts as a backlog.
const BACKLOG_PART: f64 = 0.5;
/// Share of prompts that may wait too long at the planned demand, relative to the allowed share: demand is less most of the
/// time.
const WAITING_FACTOR: f64 = 2.0;
/// A backlog should be gone after so many seconds, or at the horizon.
const MIN_DRAIN_S: f64 = 60.0;
/// More waiting sequences than this mean that decode engines are full.
const FULL_WAITING: f64 = 1.0;

/// Decides how many replicas each role should have.
#[derive(Debug, Clone)]
pub struct Planner {
    settings: PlannerSettings,
    state: PlannerState,
}

/// Everything that a planner has learned. Serializable, so that a controller continues after a restart; a state of an
/// older version with missing parts is accepted.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PlannerState {
    last_step_s: Option<f64>,
    prefill: RoleState,
    decode: RoleState,
    prefill_capacity: PrefillCapacity,
    decode_capacity: DecodeCapacity,
}

/// What is learned about either role.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
struct RoleState {
    demand: DemandForecast,
    times: StartTimes,
    budget: ErrorBudget,
    /// Replicas that were needed recently.
    recent: RecentNeeds,
}

/// Demand of a role at the times that matter.
#[derive(Debug, Clone, Copy)]
struct PlannedDemand {
    /// Until a replica that is created now could serve.
    until_started: f64,
    /// Until removing and creating a replica again would have paid off.
    until_break_even: f64,
}

impl Planner {
    /// A planner that has learned nothing.
    ///
    /// # Errors
    /// The settings contradict each other.
    pub fn new(settings: PlannerSettings) -> Result<Self, InvalidSettings> {
        Self::restore(settings, PlannerState::default())
    }

    /// A planner that continues with a state, which may be that of other settings.
    ///
    /// # Errors
    /// The settings contradict each other.
    pub fn restore(settings: PlannerSettings, state: PlannerState) -> Result<Self, InvalidSettings> {
        settings.validate()?;
        Ok(Self { settings, state })
    }

    #[must_use]
    pub fn settings(&self) -> &PlannerSettings {
        &self.settings
    }

    /// What has been learned up to the last step.
    #[must_use]
    pub fn state(&self) -> &PlannerState {
        &self.state
    }

    /// Replaces the settings, and keeps what has been learned.
    ///
    /// # Errors
    /// The settings contradict each other; the previous ones stay in effect.
    pub fn update_settings(&mut self, settings: PlannerSettings) -> Result<(), InvalidSettings> {
        settings.validate()?;
        self.settings = settings;
        Ok(())
    }

    /// Learns from the input and decides. A dry run calls it and ignores the wanted replicas.
    pub fn step(&mut self, input: &PlannerInput) -> PlannerDecision {
        let elapsed_s = self.state.last_step_s.map_or(self.settings.interval_s, |last| input.time_s - last);
        let step_s = if elapsed_s > 0.0 { elapsed_s.min(MAX_STEP_S) } else { 0.0 };
        self.state.last_step_s = Some(input.time_s);
        let allowed = 1.0 - self.settings.targets.share;
        let allowed_prefill = ErrorBudget::share_of(allowed, self.state.decode.budget.missed());
        let allowed_decode = ErrorBudget::share_of(allowed, self.state.prefill.budget.missed());

        let is_night = self.settings.is_night(input.time_s);
        let mut prefill = self.state.plan_prefill(&self.settings, input, step_s, allowed_prefill);
        let mut decode = self.state.plan_decode(&self.settings, input, step_s, allowed_decode);
        for plan in [&mut prefill, &mut decode] {
            plan.floor = plan.settings.floor(is_night);
            plan.choose();
        }
        let can_flip = |start_s: f64| self.settings.flip.is_some_and(|flip| flip.flip_s < start_s);
        let start_s = self.state.prefill.times.estimate(self.settings.prefill.start, input.time_s).start_s;
        if let Some(budget) = self.settings.gpu_budget {
            fit_budget(&mut prefill, &mut decode, budget);
        }
        let flips = if can_flip(start_s) { flip(&mut prefill, &mut decode) } else { RoleFlips::default() };
        PlannerDecision {
            time_s: input.time_s,
            prefill: prefill.decision(),
            decode: decode.decision(),
            flips,
        }
    }
}

impl PlannerState {
    fn plan_prefill<'a>(
        &mut self,
        settings: &'a PlannerSettings,
        input: &PlannerInput,
        step_s: f64,
        allowed: f64,
    ) -> RolePlan<'a> {
        let signals = &input.prefill;
        let mut missing = Vec::new();
        let has_capacity = self.prefill_capacity.record(input, step_s);
        let per_request = self.prefill_capacity.tokens_per_request();
        let demand = known(signals.arriving_tokens_per_s).or_else(|| {
            missing.push(MissingSignal::Demand);
            known(input.requests_per_s).zip(per_request).map(|(requests, tokens)| requests * tokens)
        });
        let is_idle = demand == Some(0.0) && input.requests_per_s == Some(0.0);
        if known(signals.queued_work_s).is_none() {
            missing.push(MissingSignal::Backlog);
        }
        if !has_capacity && !is_idle {
            missing.push(MissingSignal::Capacity);
        }
        let missed =
            missed_share(signals.within_target_share, signals.ttft_s, settings.targets.ttft_s, settings);
        // A first token also waits for a decode engine: then its latency says nothing about prefill.
        let is_decode_full = input.decode.waiting.is_some_and(|waiting| waiting > FULL_WAITING);
        let attributed = missed.filter(|_| !is_decode_full);
        if missed.is_none() && !is_idle {
            missing.push(MissingSignal::Latency);
        }
        let role = &mut self.prefill;
        role.record(
            &settings.prefill,
            input,
            &input.prefill_replicas,
            RoleSample { step_s, demand, missed: attributed, allowed, hit_share: signals.cache_hit_share },
        );
        let mut plan =
            role.plan(&settings.prefill, input.time_s, settings.interval_s, &input.prefill_replicas, missing);
        let rate = self.prefill_capacity.busy_tokens_per_s(settings.prefill.first_tokens_per_s);
        plan.explanation.capacity_tokens_per_s = rate;
        plan.explanation.demand_tokens_per_s = demand;

        let ttft_s = settings.targets.ttft_s;
        let queued_s = known(signals.queued_work_s).unwrap_or(0.0);
        let ready = f64::from(input.prefill_replicas.ready.max(1));
        let is_backlog = queued_s > BACKLOG_PART * ttft_s * ready;
        let extra = if is_backlog { queued_s / plan.explanation.horizon_s.max(MIN_DRAIN_S) } else { 0.0 };
        if let Some((planned, rate)) = self.prefill.planned(&plan.explanation, input.time_s).zip(rate) {
            let replicas = |demand: f64, extra: f64| {
                self.prefill_capacity.replicas(demand / rate + extra, ttft_s, WAITING_FACTOR * allowed)
            };
            let needed = replicas(planned.until_started, extra);
            plan.needed = Some(needed);
            let kept = replicas(planned.until_break_even, extra).max(needed);
            plan.kept = Some(self.prefill.recent.greatest(input.time_s, kept, plan.explanation.break_even_s));
            plan.explanation.planned_tokens_per_s = Some(planned.until_started);
            if is_backlog && replicas(planned.until_started, 0.0) <= plan.current {
                plan.growth = DecisionReason::Backlog;
            }
        } else {
            plan.needed = without_capacity(&plan, attributed, settings, is_backlog);
            plan.growth = if is_backlog { DecisionReason::Backlog } else { DecisionReason::LatencyTarget };
        }
        plan.explanation.needed = plan.needed;
        plan
    }

    fn plan_decode<'a>(
        &mut self,
        settings: &'a PlannerSettings,
        input: &PlannerInput,
        step_s: f64,
        allowed: f64,
    ) -> RolePlan<'a> {
        let signals = &input.decode;
        let mut missing = Vec::new();
        let has_capacity = self.decode_capacity.record(input, step_s);
        let capacity =
            self.decode_capacity.at_target(settings.targets.tpot_s, settings.decode.first_tokens_per_s);
        let arriving = known(input.requests_per_s)
            .zip(self.decode_capacity.tokens_per_request())
            .map(|(requests, tokens)| requests * tokens);
        let waiting = known(signals.waiting);
        let is_full = waiting.is_some_and(|waiting| waiting > FULL_WAITING);
        let demand = match known(signals.generated_tokens_per_s) {
            // Full engines generate less than the demand.
            Some(generated) if is_full => {
                Some(arriving.map_or(generated, |arriving| arriving.max(generated)))
            }
            Some(generated) => Some(generated),
            None => {
                missing.push(MissingSignal::Demand);
                arriving
            }
        };
        let is_idle = demand == Some(0.0) && signals.running == Some(0.0);
        if waiting.is_none() {
            missing.push(MissingSignal::Backlog);
        }
        if (!has_capacity || known(signals.kv_occupancy).is_none()) && !is_idle {
            missing.push(MissingSignal::Capacity);
        }
        let missed =
            missed_share(signals.within_target_share, signals.tpot_s, settings.targets.tpot_s, settings);
        if missed.is_none() && !is_idle {
            missing.push(MissingSignal::Latency);
        }
        let role = &mut self.decode;
        role.record(
            &settings.decode,
            input,
            &input.decode_replicas,
            RoleSample { step_s, demand, missed, allowed, hit_share: None },
        );
        let mut plan =
            role.plan(&settings.decode, input.time_s, settings.interval_s, &input.decode_replicas, missing);
        plan.explanation.demand_tokens_per_s = demand;
        plan.explanation.capacity_tokens_per_s = capacity.map(|capacity| capacity.tokens_per_s);
        if let Some((planned, capacity)) = self.decode.planned(&plan.explanation, input.time_s).zip(capacity)
        {
            let extra = if is_full { waiting.unwrap_or(0.0) / capacity.sequences } else { 0.0 };
            let replicas = |demand: f64, extra: f64| {
                // The conversion saturates.
                (demand / capacity.tokens_per_s + extra - NEGLIGIBLE).ceil().max(0.0) as u32
            };
            let needed = replicas(planned.until_started, extra);
            plan.needed = Some(needed);
            let kept = replicas(planned.until_break_even, extra).max(needed);
            plan.kept = Some(self.decode.recent.greatest(input.time_s, kept, plan.explanation.break_even_s));
            plan.explanation.planned_tokens_per_s = Some(planned.until_started);
            if is_full && replicas(planned.until_started, 0.0) <= plan.current {
                plan.growth = DecisionReason::Backlog;
            } else if capacity.by_memory {
                plan.growth = DecisionReason::KvMemory;
            }
        } else {
            plan.needed = without_capacity(&plan, missed, settings, is_full);
            plan.growth = if is_full { DecisionReason::Backlog } else { DecisionReason::LatencyTarget };
        }
        plan.explanation.needed = plan.needed;
        plan
    }
}

/// What a step adds to the state of a role.
struct RoleSample {
    step_s: f64,
    demand: Option<f64>,
    missed: Option<f64>,
    allowed: f64,
    hit_share: Option<f64>,
}

impl RoleState {
    fn record(
        &mut self,
        settings: &RoleSettings,
        input: &PlannerInput,
        replicas: &RoleReplicas,
        sample: RoleSample,
    ) {
        let RoleSample { step_s, demand, missed, allowed, hit_share } = sample;
        self.times.record(input.time_s, step_s, replicas, hit_share);
        if let Some(demand) = demand {
            self.demand.record(input.time_s, step_s, demand, allowed);
            let times = self.times.estimate(settings.start, input.time_s);
            let ahead_s = times.start_s + times.warmup_s;
            if let Some((expected, _)) = self.demand.expect(input.time_s, ahead_s) {
                self.demand.remember(input.time_s + ahead_s, expected);
            }
        }
        if let Some(missed) = missed {
            self.budget.record(missed, allowed, step_s, input.requests_per_s.unwrap_or(1.0));
        }
    }

    /// A plan without needs.
    fn plan<'a>(
        &self,
        settings: &'a RoleSettings,
        time_s: f64,
        interval_s: f64,
        replicas: &RoleReplicas,
        missing: Vec<MissingSignal>,
    ) -> RolePlan<'a> {
        let times = self.times.estimate(settings.start, time_s);
        let horizon_s = times.start_s + times.warmup_s + interval_s;
        let current = replicas.current();
        RolePlan {
            settings,
            floor: settings.min,
            current,
            ready: replicas.ready,
            needed: None,
            kept: None,
            growth: DecisionReason::Demand,
            wanted: current,
            explanation: RoleExplanation {
                current,
                reason: DecisionReason::Steady,
                demand_tokens_per_s: None,
                forecast_tokens_per_s: self.demand.expect(time_s, horizon_s).map(|(expected, _)| expected),
                planned_tokens_per_s: None,
                horizon_s,
                break_even_s: horizon_s + times.drain_s,
                capacity_tokens_per_s: None,
                needed: None,
                attained_share: self.budget.missed().map(|missed| 1.0 - missed),
                missing,
            },
        }
    }

    fn planned(&self, explanation: &RoleExplanation, time_s: f64) -> Option<PlannedDemand> {
        let factor = self.demand.margin() * self.budget.correction();
        let greatest = |ahead_s: f64| Some(factor * self.demand.expect(time_s, ahead_s)?.1);
        Some(PlannedDemand {
            until_started: greatest(explanation.horizon_s)?,
            until_break_even: greatest(explanation.break_even_s)?,
        })
    }
}

/// A metric that is a number of its kind.
fn known(value: Option<f64>) -> Option<f64> {
    value.filter(|value| value.is_finite() && *value >= 0.0)
}

/// The share of requests that missed a target: reported, or estimated from the percentile at the target's share.
fn missed_share(
    within: Option<f64>,
    percentile: Option<f64>,
    target: f64,
    settings: &PlannerSettings,
) -> Option<f64> {
    let allowed = 1.0 - settings.targets.share;
    let estimated =
        || known(percentile).map(|seconds| if seconds <= target { 0.5 * allowed } else { 2.0 * allowed });
    known(within).map(|within| (1.0 - within).max(0.0)).or_else(estimated)
}

/// As long as the capacity is not known: one more replica at a time while a target is missed or work is queued.
fn without_capacity(
    plan: &RolePlan<'_>,
    missed: Option<f64>,
    settings: &PlannerSettings,
    is_backlog: bool,
) -> Option<u32> {
    let is_missed = missed.is_some_and(|missed| missed > 1.0 - settings.targets.share);
    let is_starting = plan.current > plan.ready;
    (is_missed || is_backlog).then(|| plan.current + u32::from(!is_starting))
}
