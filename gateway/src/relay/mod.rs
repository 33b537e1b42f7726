//! Relays the response from the engine to the client: complete events only, with back-pressure, and never an end that looks
//! complete although it is not.

mod merge;
mod respond;
mod response_feedback;
mod stream;

pub(crate) use respond::{DispatchedResponse, RelayedRequest, to_client};
pub(crate) use response_feedback::ResponseFeedback;
