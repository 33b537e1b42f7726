//! A discrete-event simulator of a fleet around the scheduler that the gateway runs.
//!
//! | part | subject |
//! |---|---|
//! | `settings` | parameters of the simulated system |
//! | `workload`, `sessions`, `multiturn`, `agents`, `tide` | arrivals |
//! | `caches`, `store_cache`, `cache_index` | caches, and the gateways' view of them |
//! | `prefill`, `fetch_queue`, `decode`, `fleet` | engines |
//! | `event_queue`, `run`, `indices` | event loop |
//! | `gateway`, `ideal` | routing with and without schedulers |
//! | `request_class` | tenants and priorities |
//! | `outcome`, `fairness` | results |
//! | `lower_bound`, `shared_prefixes`, `bound_gap` | distance between a policy and a lower bound |
//! | `sweep`, `suite`, `suite_experiments`, `args`, `table`, `report`, `svg` | experiments and their presentation |
//! | `scaling` | a day on a fleet whose replicas come and go |
//! | `calibrate`, `published` | validation against measurements |

mod agents;
mod args;
#[cfg(test)]
mod background_tests;
mod bound_gap;
mod cache_index;
mod caches;
mod calibrate;
mod decode;
mod event_queue;
mod fairness;
mod fetch_queue;
mod fleet;
mod gateway;
mod ideal;
mod indices;
mod lower_bound;
mod multiturn;
mod outcome;
mod prefill;
mod published;
mod report;
mod request_class;
mod run;
mod scaling;
mod sessions;
mod settings;
mod shared_prefixes;
mod store_cache;
mod suite;
mod suite_experiments;
mod svg;
mod sweep;
mod table;
mod tide;
mod workload;

pub use self::agents::{AgentTrafficOptions, HumanPauses, generate_agent_traffic};
pub use self::args::{SimulateArgs, simulate};
pub use self::calibrate::{PUBLISHED_MEASUREMENTS, PublishedMeasurement, calibrate};
pub use self::fairness::ClassSummary;
pub(crate) use self::fleet::return_hints;
pub use self::ideal::IdealOrder;
pub use self::indices::{PrefillIndex, WorkloadIndex};
pub use self::multiturn::{MultiTurnOptions, MultiTurnSender};
pub use self::outcome::{RequestHistory, SimulatedOutcome, SimulationResult, SimulationSummary, quantile};
pub use self::published::{BenchmarkResult, published_plot};
pub use self::request_class::RequestClass;
pub use self::scaling::{ScalingArgs, scaling};
pub use self::settings::{EngineOutage, EngineQueueOrder, MAX_PREFILL, SimPrefetchPolicy, SimulationOptions};
pub use self::store_cache::StoreRetention;
pub use self::svg::{AxisScale, SvgPlot};
pub use self::sweep::{
    ExperimentLoad, PolicyExperiment, PolicyResult, PolicyVariant, PolicyVariantKind, SettingOverrideError,
    run_experiment, with_overrides,
};
pub use self::tide::ArrivalTide;
pub use self::workload::{ArrivalMode, ReplayOptions, SimulatedWorkload, WorkloadRequest};

#[cfg(test)]
mod tests;
