//! From the client's connection to a checked [`crate::dispatch::Ask`], and from an answer to a response.

mod admin;
mod authenticate;
mod body;
mod console;
mod engine_error;
mod fleet;
mod handler;
mod headers;
mod predict;
mod router;
mod standing;
mod workers;

pub(crate) use admin::admin_router;
pub(crate) use body::BodyLimits;
pub(crate) use fleet::FleetState;
pub(crate) use handler::Gateway;
pub(crate) use router::public_router;
pub(crate) use standing::Standing;
