//! One step, and the state that survives a restart.

use serde::{Deserialize, Serialize};

use crate::decision::{DecisionReason, PlannerDecision, RoleDecision, RoleExplanation, RoleFlips};
use crate::input::{PlannerInput, RoleReplicas};
use crate::settings::{InvalidSettings, PlannerSettings, RoleSettings};

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
pub struct PlannerState {}

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
        let is_night = self.settings.is_night(input.time_s);
        let role = |bounds: &RoleSettings, replicas: &RoleReplicas| RoleDecision {
            wanted: replicas.current().clamp(bounds.floor(is_night), bounds.max),
            explanation: RoleExplanation {
                current: replicas.current(),
                reason: DecisionReason::MissingMetric,
                demand_tokens_per_s: None,
                forecast_tokens_per_s: None,
                planned_tokens_per_s: None,
                horizon_s: 0.0,
                break_even_s: 0.0,
                capacity_tokens_per_s: None,
                needed: None,
                attained_share: None,
                missing: Vec::new(),
            },
        };
        PlannerDecision {
            time_s: input.time_s,
            prefill: role(&self.settings.prefill, &input.prefill_replicas),
            decode: role(&self.settings.decode, &input.decode_replicas),
            flips: RoleFlips::default(),
        }
    }
}
