//! How many prefill and decode replicas a deployment needs, decided once per interval of 5 to 10 s. Pure: no I/O, no
//! clock, no random source and no lock. Time is part of the input, so that a simulator runs the same code as a
//! controller, and a captured input replays to the same decision.
//!
//! ```
//! use moongate_capacity::{Planner, PlannerInput, PlannerSettings};
//!
//! let mut planner = Planner::new(PlannerSettings::default()).expect("consistent settings");
//! let decision = planner.step(&PlannerInput::at(0.0));
//! // Without any metric, the number of replicas is not reduced, but it is at least the configured minimum.
//! assert_eq!((decision.prefill.wanted, decision.decode.wanted), (1, 1));
//! ```
//!
//! | part | subject |
//! |---|---|
//! | `settings` | targets, bounds, budget and first estimates |
//! | `input` | what is observed in one interval; every metric may be missing |
//! | `decision` | wanted replicas, role flips, and why |
//! | `planner` | one step, and the state that survives a restart |
//! | `forecast` | demand of the next minutes |
//! | `prefill_capacity`, `decode_capacity` | learned capacity of a replica at the targets |
//! | `start_times` | learned times to start, to warm up and to drain |
//! | `error_budget` | the share of requests that may miss a target |
//! | `recent_needs` | replicas that were needed until recently |
//! | `role_plan` | hysteresis, bounds, budget and role flips |
//! | `smoothed` | means over time |

mod decision;
mod decode_capacity;
mod error_budget;
mod forecast;
mod input;
mod planner;
mod prefill_capacity;
mod recent_needs;
mod role_plan;
mod settings;
mod smoothed;
mod start_times;

pub use self::decision::{
    DecisionReason, MissingSignal, PlannerDecision, RoleDecision, RoleExplanation, RoleFlips,
};
pub use self::input::{
    DecodeSignals, PlannerInput, PrefillSignals, RoleReplicas, StartingReplica, WarmingReplica,
};
pub use self::planner::{Planner, PlannerState};
pub use self::settings::{
    DailyWindow, EngineStart, FlipSettings, InvalidSettings, PlannerSettings, RoleSettings, ServiceTargets,
};

#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod tests;
