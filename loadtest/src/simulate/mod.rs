//! A discrete-event simulator of a fleet around the scheduler that the gateway runs.
//!
//! | part | subject |
//! |---|---|
//! | `settings` | what is simulated |
//! | `workload`, `sessions`, `multiturn` | what arrives |
//! | `lru`, `memory`, `view` | caches, and what the gateways know of them |
//! | `prefill`, `nic`, `decode`, `fleet` | engines |
//! | `clock`, `run` | time |
//! | `ideal` | who decides without a scheduler |
//! | `outcome` | figures |
//! | `calibrate` | proof against measurements |

mod calibrate;
mod clock;
mod decode;
mod fleet;
mod ideal;
mod lru;
mod memory;
mod multiturn;
mod nic;
mod outcome;
mod prefill;
mod run;
mod sessions;
mod settings;
mod view;
mod workload;

pub use self::calibrate::{MEASURED, Measured, calibrate};
pub use self::ideal::IdealOrder;
pub use self::multiturn::{MultiTurn, MultiTurnSettings};
pub use self::outcome::{Outcome, Record, State, Summary, quantile};
pub use self::settings::{EngineOrder, Failure, MAX_PREFILL, Prefetch, Settings};
pub use self::workload::{Replay, SimRequest, Source, Workload};
