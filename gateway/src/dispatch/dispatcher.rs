//! Attempts routes until a response has started: never after a byte has reached the client, never on an engine that has failed for
//! this request.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use moongate_discovery::{Topology, TopologyReader};
use moongate_runtime::BackoffPolicy;
use moongate_scheduler::ScheduleRejection;
use serde::Deserialize;
use tokio::time::Instant;

use super::adapter_loader::AdapterLoader;
use super::attempt::attempt;
use crate::decide::{AdmissionQueue, ChosenRoute};
use crate::error::{ApiError, ApiErrorCode};
use crate::feedback::{
    AttemptTrace, ExpectedHits, GatewayMetrics, OverloadReason, RequestSpan, TtftPrediction,
};
use crate::fleet::{FleetMember, FleetReader, UpstreamEndpoint};
use crate::legs::{
    AbortSender, AttemptContext, AttemptFailure, AttemptLimits, RedispatchBudget, RedispatchDecider,
    ResponseStart, failure_code,
};
use crate::routed_request::{PickScope, RoutedRequest};
use crate::upstream::LegError;

/// How long a retry waits for new facts of a prefill engine that may have restarted: a probe takes milliseconds.
const REFRESH_TIMEOUT: Duration = Duration::from_millis(300);

/// Number and delay of retries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RetryLimits {
    /// Attempts in total, at least 1.
    pub(crate) attempts: u32,
    /// Jittered pauses between attempts.
    pub(crate) backoff: BackoffPolicy,
    pub(crate) attempt: AttemptLimits,
}

/// Sends requests to engines and retries failed attempts.
#[derive(Debug)]
pub(crate) struct RequestDispatcher {
    pub(crate) fleet: FleetReader,
    pub(crate) topology: TopologyReader,
    pub(crate) admission: Arc<AdmissionQueue>,
    pub(crate) adapters: Arc<AdapterLoader>,
    pub(crate) aborter: Arc<AbortSender>,
    pub(crate) metrics: Arc<GatewayMetrics>,
    pub(crate) limits: RetryLimits,
    pub(crate) redispatch_budget: RedispatchBudget,
}

/// A chosen route, and what is predicted of it.
#[derive(Debug)]
pub(crate) struct RouteChoice {
    pub(crate) chosen: ChosenRoute,
    /// Predicted hits of the engine that computes the prompt.
    pub(crate) expected_hits: Option<ExpectedHits>,
    /// When the first token is predicted to arrive.
    pub(crate) ttft_prediction: Option<TtftPrediction>,
}

/// Why there is no response to relay.
#[derive(Debug)]
pub(crate) enum DispatchError {
    /// An error of the gateway itself.
    Error(ApiError),
    /// The engine's response to a request that it rejects, passed on to the client, with its `Retry-After`.
    EngineRejected(StatusCode, Bytes, Option<Duration>),
}

impl RequestDispatcher {
    /// Runs attempts until a response has started.
    pub(crate) async fn dispatch(
        &self,
        routed: &RoutedRequest,
        span: &RequestSpan,
    ) -> Result<Box<ResponseStart>, DispatchError> {
        let mut tried: Vec<Arc<UpstreamEndpoint>> = Vec::new();
        let mut last: Option<AttemptFailure> = None;
        let mut failed_leg = None;
        self.redispatch_budget.deposit();
        for number in 1..=self.limits.attempts.max(1) {
            let attempt_span = AttemptTrace { span, number, failed_leg: failed_leg.take() };
            let choice = match (self.choose_route(routed, &tried, &attempt_span).await, last.take()) {
                (Ok(choice), _) => choice,
                (Err(_), Some(failure)) => return Err(into_dispatch_error(failure, number - 1)),
                (Err(rejection), None) => return Err(self.rejected(&rejection, routed)),
            };
            let RouteChoice { chosen, expected_hits, ttft_prediction } = choice;
            let context = AttemptContext {
                limits: self.limits.attempt,
                aborter: &self.aborter,
                attempt: &attempt_span,
                redispatch: RedispatchDecider {
                    admission: &self.admission,
                    budget: &self.redispatch_budget,
                    metrics: &self.metrics,
                    tried: &tried,
                    is_last: number >= self.limits.attempts,
                    exhaustion_counted: AtomicBool::new(false),
                },
            };
            match attempt(routed, chosen, &self.adapters, &context).await {
                Ok(mut started) => {
                    (started.expected_hits, started.ttft_prediction) = (expected_hits, ttft_prediction);
                    return Ok(started);
                }
                Err(mut failure) => {
                    self.record_failure(&failure, routed, span);
                    if !may_retry(&failure.error) || number >= self.limits.attempts {
                        return Err(into_dispatch_error(failure, number));
                    }
                    self.metrics.legs.record_retry(failure.side);
                    let refreshed = match &failure.stale_prefill {
                        Some(prefill) => self.refresh_facts(prefill).await,
                        None => false,
                    };
                    if !refreshed {
                        tried.push(failure.endpoint.clone());
                        tried.extend(failure.other_engine.clone());
                    }
                    failed_leg = failure.leg.take();
                    // The silence limit has already delayed this request.
                    let is_silence = matches!(failure.error, LegError::Silent(_));
                    last = Some(failure);
                    if !is_silence {
                        let pause = self.limits.backoff.jittered_pause(number, fastrand::f64());
                        tokio::time::sleep(pause).await;
                    }
                }
            }
        }
        // Unreachable: the last iteration returns.
        Err(DispatchError::Error(ApiError::new(ApiErrorCode::NoEngineAvailable, "no attempt was made")))
    }

    /// Waits for a route, with what is predicted of it.
    pub(super) async fn choose_route(
        &self,
        routed: &RoutedRequest,
        tried: &[Arc<UpstreamEndpoint>],
        attempt: &AttemptTrace<'_>,
    ) -> Result<RouteChoice, ScheduleRejection> {
        let decision_span = attempt.decide();
        let chosen = self.admission.choose(routed, tried).await;
        let now = Instant::now();
        decision_span.finish(chosen.as_ref().map(ChosenRoute::decided), now);
        let chosen = chosen?;
        if chosen.mixes_versions(&self.fleet.current().versions) {
            self.metrics.legs.record_mixed_versions();
        }
        let pending_tokens = chosen.decision.as_ref().map_or(0, |decision| decision.decision.pending_tokens);
        let expected_hits = routed
            .prompt_prediction
            .as_ref()
            .and_then(|predicted| predicted.expected_hits(&chosen.prefill))
            .map(|expected| expected.with_pending(pending_tokens));
        let ttft_prediction = self.ttft_prediction(&chosen, now);
        Ok(RouteChoice { chosen, expected_hits, ttft_prediction })
    }

    /// The error of a request for which there is no route.
    pub(super) fn rejected(&self, rejection: &ScheduleRejection, routed: &RoutedRequest) -> DispatchError {
        let is_outage = !self.fleet.current().unusable.is_empty();
        DispatchError::Error(rejection_error(rejection, routed, is_outage))
    }

    /// Requests a new probe of `prefill` and returns whether it brought new facts: then the same pair is worth another attempt.
    async fn refresh_facts(&self, prefill: &FleetMember) -> bool {
        let id = &prefill.endpoint.id;
        let changed = |topology: &Topology| {
            topology
                .get(id)
                .is_some_and(|now| now.usable_facts().is_some() && now.facts != prefill.instance.facts)
        };
        self.topology.request_probe(id);
        let mut topology = self.topology.clone();
        let changed = tokio::time::timeout(REFRESH_TIMEOUT, topology.wait_for(changed)).await;
        if !matches!(changed, Ok(Some(_))) {
            return false;
        }
        self.fleet.wait_for(topology.current().generation).await;
        true
    }

    fn ttft_prediction(&self, chosen: &ChosenRoute, predicted_at: Instant) -> Option<TtftPrediction> {
        let ttft = chosen.decision.as_ref()?.decision.predicted_ttft?;
        Some(TtftPrediction { predicted_at, ttft: self.admission.to_wall_time(ttft) })
    }

    pub(super) fn record_failure(
        &self,
        failure: &AttemptFailure,
        routed: &RoutedRequest,
        span: &RequestSpan,
    ) {
        let AttemptFailure { side, endpoint, error, .. } = failure;
        endpoint.record_failure(error);
        self.metrics.legs.record_failure(*side, error);
        let request_id = routed.id.to_str().ok();
        let trace_id = span.trace_id().map(tracing::field::display);
        if matches!(error, LegError::NoConnectionLeft) {
            self.metrics.overload.record_rejected(OverloadReason::EngineConnections);
            tracing::warn!(side = side.as_str(), engine = %endpoint.id, %error, request_id, trace_id, "leg not started");
            return;
        }
        if matches!(error, LegError::AdapterLoad(_)) {
            // Logged by the load, which several requests wait for.
            tracing::debug!(side = side.as_str(), engine = %endpoint.id, %error, request_id, trace_id, "leg not started");
            return;
        }
        if !error.blames_engine() {
            // The client gets this error. It is not logged because the engine's message may quote the prompt.
            tracing::debug!(side = side.as_str(), engine = %endpoint.id, request_id, trace_id, "engine rejected the request");
            return;
        }
        tracing::warn!(side = side.as_str(), engine = %endpoint.id, %error, request_id, trace_id, "leg failed");
        if !matches!(error, LegError::Silent(_)) {
            // A restarted engine answers with errors until it is probed again.
            self.topology.request_probe(&endpoint.id);
        }
    }
}

/// Engine faults are retried on another engine. A response that blames the request is not retried, nor is a timeout, which has
/// already used up a whole time limit.
fn may_retry(error: &LegError) -> bool {
    match error {
        LegError::Timeout(..) | LegError::NoConnectionLeft => false,
        LegError::Status(status, _) => {
            status.is_server_error()
                || matches!(*status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
        }
        LegError::EngineError(json) => reported_status(json).is_none_or(|status| status.is_server_error()),
        _ => true,
    }
}

/// `code` of an engine's error event, if it is an HTTP status. It is a member of `error`, or next to `"object":"error"`.
fn reported_status(json: &[u8]) -> Option<StatusCode> {
    #[derive(Deserialize)]
    struct EngineErrorEvent {
        error: Option<EngineErrorObject>,
        code: Option<serde_json::Value>,
    }
    #[derive(Deserialize)]
    struct EngineErrorObject {
        code: Option<serde_json::Value>,
    }
    let EngineErrorEvent { error, code } = serde_json::from_slice(json).ok()?;
    let code = error.map_or(code, |error| error.code)?.as_u64()?;
    StatusCode::from_u16(u16::try_from(code).ok()?)
        .ok()
        .filter(|s| s.is_client_error() || s.is_server_error())
}

/// `is_outage`: a listed engine is not usable now.
fn rejection_error(rejection: &ScheduleRejection, routed: &RoutedRequest, is_outage: bool) -> ApiError {
    let model = routed.model.as_deref().unwrap_or("this request");
    let unavailable = |text| {
        let mut error = ApiError::new(ApiErrorCode::NoEngineAvailable, text);
        error.retry_after = Some(Duration::from_secs(1));
        error
    };
    if let (ScheduleRejection::NoneAvailable { .. }, Some(Err(error))) = (rejection, &routed.translated) {
        return error.clone();
    }
    if routed.pick_scope.as_ref().is_some_and(PickScope::is_restricted)
        && !matches!(rejection, ScheduleRejection::Overloaded { .. })
    {
        return unavailable(format!("{model}: none of the engines that the proxy allows is available now"));
    }
    match rejection {
        // The model was served when the request was read.
        ScheduleRejection::UnknownModel => {
            unavailable(format!("no engine that serves {model} is usable any more"))
        }
        ScheduleRejection::NoneAvailable { prefills: 0, decodes: 0 } if routed.needs_stored_response() => ApiError::new(
            ApiErrorCode::UnsupportedByFleet,
            "no engine of this fleet can continue a response, because SGLang's pairs keep only a part of it; send the whole \
             conversation in `input`, or start the gateway with --response-store",
        )
        .param("previous_response_id"),
        ScheduleRejection::NoneAvailable { prefills: 0, decodes: 0 } if !is_outage => ApiError::new(
            ApiErrorCode::UnsupportedByFleet,
            format!("no engine in this fleet serves {}", routed.uri.path()),
        ),
        ScheduleRejection::NoneAvailable { .. } => unavailable(format!("{model}: {rejection}")),
        ScheduleRejection::Overloaded { retry_after } => {
            let mut error = ApiError::new(ApiErrorCode::Overloaded, rejection.to_string());
            error.retry_after = Some(Duration::from_secs_f64(retry_after.max(1.0)));
            error
        }
    }
}

pub(super) fn into_dispatch_error(failure: AttemptFailure, attempts: u32) -> DispatchError {
    let AttemptFailure { side, endpoint, error, retry_after, .. } = failure;
    match &error {
        LegError::Status(status, body) if status.is_client_error() => {
            return DispatchError::EngineRejected(*status, body.clone(), retry_after);
        }
        LegError::EngineError(json) => {
            if let Some(status) = reported_status(json).filter(StatusCode::is_client_error) {
                return DispatchError::EngineRejected(status, json.clone(), None);
            }
        }
        _ => {}
    }
    let code = failure_code(side, &error);
    let attempts = if attempts == 1 { "1 attempt".to_owned() } else { format!("{attempts} attempts") };
    let message = format!("{} engine {} {error} (after {attempts})", side.as_str(), endpoint.id);
    let mut api_error = ApiError::new(code, message);
    if matches!(
        code,
        ApiErrorCode::EngineUnavailable | ApiErrorCode::GatewayOverloaded | ApiErrorCode::AdapterLoadFailed
    ) {
        api_error.retry_after = Some(retry_after.unwrap_or(Duration::from_secs(1)));
    }
    DispatchError::Error(api_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_engine_faults_are_retried() {
        let status = |code: u16| LegError::Status(StatusCode::from_u16(code).unwrap(), Bytes::new());
        assert!([500, 502, 503, 429, 408].into_iter().all(|code| may_retry(&status(code))));
        assert!([400, 401, 404, 422].into_iter().all(|code| !may_retry(&status(code))));
        assert!(may_retry(&LegError::Closed));
        assert!(may_retry(&LegError::Silent(Duration::from_secs(2))));
        assert!(!may_retry(&LegError::Timeout("sent no data", Duration::from_secs(1))));
        let reported = |text: &'static str| LegError::EngineError(Bytes::from_static(text.as_bytes()));
        assert!(may_retry(&reported(r#"{"error":{"message":"x","code":500}}"#)));
        assert!(!may_retry(&reported(r#"{"error":{"message":"too long","code":400}}"#)));
        assert!(may_retry(&reported(r#"{"error":{"message":"x","code":"internal"}}"#)));
        assert!(!may_retry(&reported(r#"{"object":"error","message":"too long","code":400}"#)));
    }
}
