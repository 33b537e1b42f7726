//! Handling of silent engines: the engine becomes suspect, and its request is redispatched within a budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::redispatch_budget::RedispatchBudget;
use crate::decide::AdmissionQueue;
use crate::feedback::{GatewayMetrics, RedispatchReason};
use crate::fleet::{SilenceLimits, SuspicionReason, UpstreamEndpoint};
use crate::routed_request::RoutedRequest;
use crate::upstream::LegKind;

/// Time per token of a non-streamed response. Slower than engines generate, because their progress is not visible.
const TIME_PER_TOKEN: Duration = Duration::from_millis(50);

/// Silence limits of the engines of one attempt, before its first byte.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttemptSilenceLimits {
    /// Until the prompt is computed, and for a stream until its first token.
    first_token: Duration,
    /// For the leg that answers the client; `None` for a non-streamed response of unknown length.
    response: Option<Duration>,
}

impl AttemptSilenceLimits {
    /// Limits of an attempt whose first token is expected after `expected`; `None` if the detection is off.
    pub(crate) fn new(limits: &SilenceLimits, expected: Duration, routed: &RoutedRequest) -> Option<Self> {
        let first_token = limits.limit(expected)?;
        let response = match (routed.routing.stream, routed.routing.max_output_tokens) {
            (true, _) => Some(first_token),
            (false, Some(tokens)) => {
                limits.limit(expected.saturating_add(TIME_PER_TOKEN.saturating_mul(tokens)))
            }
            (false, None) => None,
        };
        Some(Self { first_token, response })
    }

    /// Limits of a prefill that runs alone, to its end.
    pub(super) fn prefill_only(self) -> Self {
        Self { response: Some(self.first_token), ..self }
    }

    /// The current limit: that of the response applies once the prompt is computed.
    pub(super) fn limit(&self, prefilling: bool) -> Option<Duration> {
        if prefilling { Some(self.first_token) } else { self.response }
    }
}

/// A leg without a byte, on an engine that produces no output for other requests either.
#[derive(Debug, Clone)]
pub(crate) struct SilentLeg {
    pub(super) side: LegKind,
    pub(super) endpoint: Arc<UpstreamEndpoint>,
    silence: Duration,
    /// The silence exceeds the leg's own limit; otherwise other requests have made the engine suspect.
    exceeds_limit: bool,
}

/// The silent legs of one attempt.
pub(crate) type SilentLegs = SmallVec<[SilentLeg; 2]>;

impl SilentLeg {
    /// Checks a leg that has waited since `since` for its first byte.
    pub(super) fn detect(
        side: LegKind,
        endpoint: &Arc<UpstreamEndpoint>,
        since: Instant,
        limit: Option<Duration>,
        now: Instant,
    ) -> Option<Self> {
        let silence = endpoint.silence.silence(now, since);
        let is_over_limit = limit.is_some_and(|limit| silence >= limit);
        let is_silent = is_over_limit || endpoint.silence.should_redispatch(now, since, limit);
        is_silent.then(|| Self { side, endpoint: endpoint.clone(), silence, exceeds_limit: is_over_limit })
    }

    /// How long its engine has produced no output.
    pub(super) fn silence(&self) -> Duration {
        self.silence
    }

    fn reason(&self) -> RedispatchReason {
        if self.exceeds_limit { RedispatchReason::Silent } else { RedispatchReason::Suspect }
    }

    /// Whether its engine is suspect, unhealthy or has an open breaker, independently of this request.
    fn is_unresponsive(&self) -> bool {
        !self.endpoint.is_available()
    }
}

/// Decides for one attempt whether its request leaves silent engines.
#[derive(Debug)]
pub(crate) struct RedispatchDecider<'a> {
    pub(crate) admission: &'a Arc<AdmissionQueue>,
    pub(crate) budget: &'a RedispatchBudget,
    pub(crate) metrics: &'a GatewayMetrics,
    /// Engines that earlier attempts have used.
    pub(crate) tried: &'a [Arc<UpstreamEndpoint>],
    /// The last attempt waits until its time limits.
    pub(crate) is_last: bool,
    pub(crate) exhaustion_counted: AtomicBool,
}

impl RedispatchDecider<'_> {
    /// Makes silent engines suspect. Returns the legs to give up if the request should be redispatched.
    pub(super) fn should_redispatch(&self, routed: &RoutedRequest, silent: SilentLegs) -> Option<SilentLegs> {
        let legs = self.legs_at_fault(routed, silent);
        let first = legs.first()?;
        let now = Instant::now();
        for leg in legs.iter().filter(|leg| leg.exceeds_limit) {
            suspect(leg.side, &leg.endpoint, SuspicionReason::Silent, now, self.metrics);
        }
        if self.is_last || !self.has_alternative(routed, &legs) {
            return None;
        }
        if !self.budget.withdraw(now) {
            if !self.exhaustion_counted.swap(true, Ordering::Relaxed) {
                self.metrics.silence.budget_exhausted();
            }
            return None;
        }
        self.metrics.silence.record_redispatch(first.reason());
        Some(legs)
    }

    /// Of two legs that wait for each other, possibly only one is at fault: the one whose engine is already suspect, else both if
    /// there is another pair without either, else the one whose exclusion leaves another pair.
    fn legs_at_fault(&self, routed: &RoutedRequest, silent: SilentLegs) -> SilentLegs {
        let [first_leg, second_leg] = silent.as_slice() else { return silent };
        let only = |leg: &SilentLeg| SilentLegs::from_iter([leg.clone()]);
        match (first_leg.is_unresponsive(), second_leg.is_unresponsive()) {
            (true, false) => return only(first_leg),
            (false, true) => return only(second_leg),
            _ => {}
        }
        if self.has_alternative(routed, &silent) {
            return silent;
        }
        let single_leg =
            [first_leg, second_leg].into_iter().map(only).find(|legs| self.has_alternative(routed, legs));
        single_leg.unwrap_or(silent)
    }

    fn has_alternative(&self, routed: &RoutedRequest, abandoned_legs: &[SilentLeg]) -> bool {
        let abandoned_legs = abandoned_legs.iter().map(|leg| &leg.endpoint);
        let tried: Vec<Arc<UpstreamEndpoint>> = self.tried.iter().chain(abandoned_legs).cloned().collect();
        self.admission.has_available_route(routed, &tried)
    }
}

/// Makes an engine suspect, unless it already is.
pub(super) fn suspect(
    side: LegKind,
    endpoint: &UpstreamEndpoint,
    reason: SuspicionReason,
    now: Instant,
    metrics: &GatewayMetrics,
) {
    if endpoint.silence.mark_suspect(now) {
        became_suspect(side, endpoint, reason, metrics);
    }
}

/// A client has left before the first byte of a leg that started at `since`.
pub(super) fn abandoned(
    side: LegKind,
    endpoint: &UpstreamEndpoint,
    (since, limit): (Instant, Duration),
    metrics: &GatewayMetrics,
) {
    if endpoint.silence.record_abandoned(Instant::now(), since, limit) {
        became_suspect(side, endpoint, SuspicionReason::Abandoned, metrics);
    }
}

fn became_suspect(
    side: LegKind,
    endpoint: &UpstreamEndpoint,
    reason: SuspicionReason,
    metrics: &GatewayMetrics,
) {
    metrics.silence.record_suspicion(side, reason);
    tracing::warn!(
        side = side.as_str(),
        engine = %endpoint.id,
        reason = reason.as_str(),
        "engine accepts requests but produces no output; new requests avoid it"
    );
}
