//! Relays the response from the engine to the client: complete events only, with back-pressure, and never an end that looks
//! complete although it is not.

mod merge;
mod stream;

pub(crate) use merge::{SampleResponse, merge_complete, merge_stream};
pub(crate) use stream::{RelayContext, ResponseRelay};
