//! Connections to engines.
//!
//! An engine connection is driven by its user: it has no task of its own, and no channel between tasks. Dropping the exchange
//! closes the socket at once, which aborts the leg, and nothing can leak.

mod chunked_body;
mod connection;
mod leg;
mod pool;
mod query;
mod request_writer;
mod response_head;
mod response_parser;

pub(crate) use leg::{LegError, LegEvent, LegExchange, LegKind, LegTimeouts};
pub(crate) use pool::{ConnectionPool, ConnectionPoolLimits, PreparedRequest, split_url};
pub(crate) use query::{EngineQuery, EngineQueryError};
pub use response_parser::{NotHttp, ResponseParser};
