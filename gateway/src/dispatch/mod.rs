//! Drives one request through the engines' protocols: chooses a route, starts the legs, waits for the first bytes, and retries on
//! another pair after a failure.

mod abort;
mod admission_queue;
mod attempt;
mod clock;
mod connector;
mod dispatcher;
mod eligibility;
pub(crate) mod fan_out;
mod in_flight;
mod pair;
mod redispatch_budget;
mod routed_request;
mod running_leg;
mod silence;

pub(crate) use abort::AbortSender;
pub(crate) use admission_queue::AdmissionQueue;
pub(crate) use attempt::{AttemptLimits, ResponsePayload, ResponseStart};
pub(crate) use clock::SchedulerClock;
pub(crate) use dispatcher::{DispatchError, RequestDispatcher, RetryLimits, failure_code};
pub(crate) use in_flight::InFlightGuard;
pub(crate) use pair::{LegPair, PairEvent};
pub(crate) use redispatch_budget::RedispatchBudget;
pub(crate) use routed_request::{RoutedRequest, random_uuid};
