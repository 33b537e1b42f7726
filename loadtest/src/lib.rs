//! Engine simulator, load generator and trace replay.
//!
//! * [`engine`] – inference engines with SGLang's or vLLM's wire protocol, a deterministic model, a time model, a
//!   three-level prefix cache and switchable faults. Used by `moongate up` and the end-to-end tests.
//! * [`generate`] – an open-loop load generator for any OpenAI-compatible endpoint, by rate or by trace.
//! * [`simulate`] – a discrete-event simulator of a fleet around the scheduler that the gateway runs.
//! * [`live`] – a real gateway with simulated engines on a faster clock, compared with the simulator.
//! * [`cli`] – the `moongate loadtest …` commands.

pub mod cli;
pub mod engine;
pub mod generate;
pub mod live;
mod prefix_lru;
pub mod simulate;

pub use cli::{LoadtestCommand, run};
