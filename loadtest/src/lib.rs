//! Engine simulator, load generator and trace replay.
//!
//! * [`engine`] – inference engines that speak SGLang's or vLLM's wire protocol, with a deterministic model, a
//!   service-time model, a prefix cache of three levels and switchable faults. `moongate up` and the
//!   end-to-end tests run on them.
//! * [`generate`] – an open-loop load generator for any OpenAI-compatible endpoint, by rate or by trace.
//! * [`simulate`] – a discrete-event simulator of a fleet around the scheduler that the gateway runs.
//! * [`live`] – the gateway itself between simulated engines on compressed time, beside the simulator.
//! * [`cli`] – the `moongate loadtest …` commands.

pub mod cli;
pub mod engine;
pub mod generate;
pub mod live;
pub mod simulate;

pub use cli::{LoadtestCommand, run};
