//! A discrete-event simulator of a fleet around the scheduler that the gateway runs.
//!
//! | part | subject |
//! |---|---|
//! | `settings` | what is simulated |
//! | `workload`, `sessions`, `multiturn`, `agents` | what arrives |
//! | `lru`, `memory`, `view` | caches, and what the gateways know of them |
//! | `prefill`, `nic`, `decode`, `fleet` | engines |
//! | `clock`, `run` | time |
//! | `gateway`, `ideal` | who decides: schedulers, or nobody |
//! | `outcome` | figures |
//! | `sweep`, `suite`, `args`, `table`, `report`, `svg` | experiments and how they are told |
//! | `calibrate`, `published` | proof against measurements |

mod agents;
mod args;
mod calibrate;
mod clock;
mod decode;
mod fleet;
mod gateway;
mod ideal;
mod lru;
mod memory;
mod multiturn;
mod nic;
mod outcome;
mod prefill;
mod published;
mod report;
mod run;
mod sessions;
mod settings;
mod suite;
mod svg;
mod sweep;
mod table;
mod view;
mod workload;

pub use self::agents::{AgentSettings, agents};
pub use self::args::{SimulateArgs, simulate};
pub use self::calibrate::{MEASURED, Measured, calibrate};
pub use self::ideal::IdealOrder;
pub use self::multiturn::{MultiTurn, MultiTurnSettings};
pub use self::outcome::{Outcome, Record, State, Summary, quantile};
pub use self::published::{Shown, published_plot};
pub use self::settings::{EngineOrder, Failure, MAX_PREFILL, Prefetch, Settings};
pub use self::svg::{Plot, Scale};
pub use self::sweep::{Case, ChangeError, Contender, ContenderKind, Load, Standing, changed, run_case};
pub use self::workload::{Replay, SimRequest, Source, Workload};

#[cfg(test)]
mod tests;
