//! The RPC port: its connections and its threads.
//!
//! Every thread has its own runtime. A connection stays on one thread, which reads, executes and answers its requests without a
//! hand-over between threads.

mod budget;
mod busy_poll;
mod connection;
mod listener;
mod worker;

pub use listener::{RpcServer, RpcServerError, serve};
