//! Drives one request through the engines' protocols: chooses a route, starts the legs, waits for the first bytes,
//! and goes to another pair if that fails.

mod abort;
mod ask;
mod attempt;
mod booked;
mod clock;
mod decide;
mod desk;
pub(crate) mod fan_out;
mod pair;
mod protocol;
mod redispatch_budget;
mod retry;
mod sglang;
mod silence;
mod vllm;

pub(crate) use abort::Aborter;
pub(crate) use ask::{Ask, random_uuid};
pub(crate) use attempt::{Answer, AttemptLimits, Started};
pub(crate) use booked::Booked;
pub(crate) use clock::Clock;
pub(crate) use decide::{Chosen, Reasons};
pub(crate) use desk::Desk;
pub(crate) use pair::{Pair, PairEvent, Side};
pub(crate) use redispatch_budget::RedispatchBudget;
pub(crate) use retry::{Dispatcher, Refused, RetryLimits, failure_code};
pub(crate) use silence::RedispatchReason;
