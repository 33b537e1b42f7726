//! Connections to engines.
//!
//! An engine connection is driven by its user: it has no task of its own, and no channel between tasks. Dropping the exchange
//! closes the socket at once, which aborts the leg, and nothing can leak.

mod connection;
mod leg;
mod pool;

pub(crate) use leg::{LegError, LegEvent, LegExchange, LegKind, LegTimeouts};
pub(crate) use pool::{ConnectionPool, ConnectionPoolLimits, PreparedRequest, split_url};
