//! The trace of a request: its span, with those of its legs below, and its other steps, which are only made spans if somebody will see them.

mod decision;
mod facts;
mod leg;
mod request;
mod tries;

pub(crate) use leg::LegSpan;
pub(crate) use request::RequestSpan;
pub(crate) use tries::Try;
