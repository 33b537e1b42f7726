//! The trace of a request: its span, child spans of its legs, and further steps, which become spans only if the trace is exported.

mod attempts;
mod decision;
mod leg;
mod request;
mod request_fields;

pub(crate) use attempts::AttemptTrace;
pub(crate) use decision::DecidedRoute;
pub(crate) use leg::LegSpan;
pub(crate) use request::{RequestDescription, RequestSpan};
