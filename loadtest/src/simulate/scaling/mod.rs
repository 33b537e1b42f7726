//! A day on a fleet whose replicas come and go, with different controllers of their number. Leaner than the simulator of
//! routing: one queue in front of all prefill engines, and caches that are warm or cold as a whole.
//!
//! | part | subject |
//! |---|---|
//! | `workload` | the requests of a day |
//! | `replica`, `fleet`, `observation`, `run` | engines, their states, and what controllers observe |
//! | `rivals`, `dynamo`, `planned` | controllers |
//! | `tune`, `comparison`, `args` | best parameters, tables, command line |

mod args;
mod comparison;
mod dynamo;
mod fleet;
mod observation;
mod planned;
mod replica;
mod rivals;
mod run;
mod tune;
mod workload;

pub use self::args::{ScalingArgs, scaling};

#[cfg(test)]
mod tests;
