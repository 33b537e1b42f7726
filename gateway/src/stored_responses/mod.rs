//! Responses of OpenAI's Responses API that later requests refer to by their id.
//!
//! Engines keep them in their own memory, if at all: the gateway sends such a request to the engine that made the response
//! ([`ResponseOwners`]). With `--response-store` the gateway keeps them itself ([`ResponseStore`]): a request that continues one is sent with
//! the whole conversation, so any engine can serve it, and its prompt can be predicted.

mod continuation;
mod owners;
mod store;

pub(crate) use continuation::continued_input;
pub(crate) use owners::{ResponseOwners, response_id};
pub(crate) use store::{ResponseKey, ResponseStore, StoredResponse};
