//! Client of a Mooncake-compatible KV store, for whoever wants to know where pages are: metadata only, no pages.
//!
//! - [`rpc`]: calls to the master, in whatever release's dialect it speaks.
//! - [`admin`]: the master's HTTP server, which lists keys and tells where objects are without leasing them.
//! - [`nodes`]: which store nodes live, noticed long before the master does.
//! - [`snapshot`]: all pages and where they are, read slowly enough that the master does not feel it.

pub mod admin;
mod backoff;
pub mod nodes;
pub mod rpc;
pub mod snapshot;

pub use backoff::{Backoff, BackoffPolicy};
