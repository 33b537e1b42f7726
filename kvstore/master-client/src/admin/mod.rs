//! Client of the master's admin server: HTTP, by default on port 9003.
//!
//! Unlike the RPCs, it lists keys, and locates objects without leasing them. Endpoints differ between releases; a missing one
//! is an [`AdminError::NotFound`].

mod client;
mod error;
mod keys;
mod lines;
mod query;

pub use client::{AdminClient, AdminClientOptions};
pub use error::{AdminAddressError, AdminError, AdminResponseError, HttpRequestError};
pub use keys::{KeyBatch, KeyStream};
pub(crate) use query::BatchKeyQuery;
