//! The master's admin server: HTTP, port 9003 if not set otherwise.
//!
//! It tells what the RPCs do not: which keys there are, and where objects are without leasing them. Releases
//! differ in what they have; an endpoint that is missing is an [`AdminError::Missing`].

mod client;
mod error;
mod keys;
mod lines;
mod query;

pub use client::{AdminClient, AdminClientOptions};
pub use error::AdminError;
pub(crate) use error::root_cause;
pub use keys::{KeyBatch, KeyStream};
pub(crate) use query::BatchKeyQuery;
