//! Sessions: requests that clients name as parts of one conversation, and where their last request went.
//!
//! A session is a hint. With a prediction the engines' own events say what they have cached; without one – a prompt that cannot be
//! tokenized here, a model without events – the engine that computed the session's last prompt is assumed to have it.

mod name;
mod routes;

pub(crate) use name::session;
pub(crate) use routes::{SessionRoute, SessionRoutes};
