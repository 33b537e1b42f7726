//! Attempts a request on one route after another until its response has started.

mod adapter_loader;
mod attempt;
mod dispatcher;
pub(crate) mod fan_out;

pub(crate) use adapter_loader::AdapterLoader;
pub(crate) use dispatcher::{DispatchError, RequestDispatcher, RetryLimits};
