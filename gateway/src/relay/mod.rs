//! From the decode engine to the client: complete events only, with back-pressure, and never an end that looks
//! complete when it is not.

mod answer;
mod merge;
mod sse;
mod stream;

pub(crate) use answer::{Ending, Summary, Usage};
pub(crate) use merge::{Sample, merge_stream, merge_whole};
pub use sse::{SseFault, SseGate};
pub(crate) use stream::{Relay, RelayParts};
