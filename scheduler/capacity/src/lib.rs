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

mod decision;
mod input;
mod planner;
mod settings;

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
