//! The one or two legs of an attempt, from their start until the response has started: their events become those of one response,
//! silent engines are noticed, and legs that are no longer needed are aborted.

mod abort;
mod attempt;
mod failure;
mod pair;
mod redispatch_budget;
mod response_start;
mod running_leg;
mod silence;

pub(crate) use abort::{AbortSender, EngineRequestId};
pub(crate) use attempt::{AttemptContext, AttemptLimits};
pub(crate) use failure::{AttemptFailure, failure_code};
pub(crate) use pair::{LegPair, PairEvent};
pub(crate) use redispatch_budget::RedispatchBudget;
pub(crate) use response_start::{
    ResponsePayload, ResponseStart, check_response, first_bytes, prefill_response,
};
pub(crate) use running_leg::{RunningLeg, is_event_stream};
pub(crate) use silence::{AttemptSilenceLimits, RedispatchDecider};
