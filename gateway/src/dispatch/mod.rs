//! Drives one request through the engines' protocols: chooses a route, starts the legs, waits for the first bytes, and retries on
//! another pair after a failure.

mod abort;
mod attempt;
mod connector;
mod dispatcher;
pub(crate) mod fan_out;
mod pair;
mod redispatch_budget;
mod running_leg;
mod silence;

pub(crate) use abort::AbortSender;
pub(crate) use attempt::{AttemptLimits, ResponsePayload, ResponseStart};
pub(crate) use dispatcher::{DispatchError, RequestDispatcher, RetryLimits, failure_code};
pub(crate) use pair::{LegPair, PairEvent};
pub(crate) use redispatch_budget::RedispatchBudget;
