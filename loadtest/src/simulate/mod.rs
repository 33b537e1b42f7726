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
mod cache_index;
mod caches;
mod calibrate;
mod decode;
mod event_queue;
mod fetch_queue;
mod fleet;
mod gateway;
mod ideal;
mod lru;
mod multiturn;
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
mod workload;

pub use self::agents::{AgentTrafficOptions, generate_agent_traffic};
pub use self::args::{SimulateArgs, simulate};
pub use self::calibrate::{PUBLISHED_MEASUREMENTS, PublishedMeasurement, calibrate};
pub use self::ideal::IdealOrder;
pub use self::multiturn::{MultiTurnOptions, MultiTurnSender};
pub use self::outcome::{RequestHistory, SimulatedOutcome, SimulationResult, SimulationSummary, quantile};
pub use self::published::{BenchmarkResult, published_plot};
pub use self::settings::{EngineOutage, EngineQueueOrder, MAX_PREFILL, SimPrefetchPolicy, SimulationOptions};
pub use self::svg::{AxisScale, SvgPlot};
pub use self::sweep::{
    ExperimentLoad, PolicyExperiment, PolicyResult, PolicyVariant, PolicyVariantKind, SettingOverrideError,
    run_experiment, with_overrides,
};
pub use self::workload::{ArrivalMode, ReplayOptions, SimulatedWorkload, WorkloadRequest};

#[cfg(test)]
mod tests;
