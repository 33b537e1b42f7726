//! Attempts a request on one route after another until its response has started.

mod adapter_loader;
mod attempt;
mod dispatcher;
pub(crate) mod fan_out;
mod pick;

pub(crate) use adapter_loader::AdapterLoader;
pub(crate) use dispatcher::{DispatchError, RequestDispatcher, RetryLimits, RouteChoice};
pub(crate) use pick::{PickSlot, PickedRoute};
