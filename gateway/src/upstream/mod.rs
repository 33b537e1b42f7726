//! Connections to engines.
//!
//! An engine connection is driven by whoever uses it: no task of its own, no channel between tasks. Dropping the
//! exchange closes the socket at once, which is how a leg is aborted, and nothing can leak.

mod connection;
mod leg;
mod pool;

pub(crate) use leg::{LegError, LegEvent, LegExchange, LegTimeouts};
pub(crate) use pool::{ConnectionPool, ConnectionPoolLimits, PreparedRequest, split_url};
