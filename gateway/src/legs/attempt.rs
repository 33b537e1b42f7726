//! What the legs of one attempt share: its limits, and what acts on it.

use std::sync::Arc;

use super::abort::AbortSender;
use super::silence::RedispatchDecider;
use crate::feedback::AttemptTrace;
use crate::routed_request::RoutedRequest;
use crate::upstream::LegTimeouts;

#[derive(Debug, Clone, Copy)]
pub(crate) struct AttemptLimits {
    /// Time limits of the prefill leg.
    pub(crate) prefill: LegTimeouts,
    /// Time limits of a leg with a streamed response.
    pub(crate) stream: LegTimeouts,
    /// Time limits of a leg with a non-streamed response, which arrives after the whole generation.
    pub(crate) non_stream: LegTimeouts,
    /// Non-streamed responses are buffered up to this size, so that a truncated one can be retried.
    pub(crate) response_buffer_bytes: usize,
}

impl AttemptLimits {
    /// Time limits of the leg that answers the client.
    pub(crate) fn main_timeouts(&self, routed: &RoutedRequest) -> LegTimeouts {
        if routed.routing.stream { self.stream } else { self.non_stream }
    }
}

/// Limits, trace and collaborators of an attempt.
pub(crate) struct AttemptContext<'a> {
    pub(crate) limits: AttemptLimits,
    pub(crate) aborter: &'a Arc<AbortSender>,
    pub(crate) attempt: &'a AttemptTrace<'a>,
    pub(crate) redispatch: RedispatchDecider<'a>,
}
