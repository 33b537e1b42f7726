//! The trace of a request: its span, with those of its legs below, and its other steps, which are only made spans if somebody will see them.

mod attempts;
mod decision;
mod leg;
mod request;
mod request_fields;

pub(crate) use attempts::AttemptTrace;
pub(crate) use leg::LegSpan;
pub(crate) use request::RequestSpan;
