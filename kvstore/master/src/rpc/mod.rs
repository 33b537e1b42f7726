//! The RPC port: connections, and the threads that serve them.
//!
//! Every thread has a runtime of its own. A connection stays on one thread, where its requests are read, executed and
//! answered without a hand-over.

mod budget;
mod busy_poll;
mod connection;
mod listener;
mod stream;
mod worker;

pub use listener::{RpcServer, RpcServerError, serve};
