//! Why an attempt has failed.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use moongate_telemetry::SpanContext;

use super::pair::LegPair;
use super::silence::SilentLegs;
use crate::error::ApiErrorCode;
use crate::fleet::{FleetMember, UpstreamEndpoint};
use crate::lora_adapters::AdapterLoadError;
use crate::response::SseError;
use crate::upstream::{LegError, LegKind};

#[derive(Debug)]
pub(crate) struct AttemptFailure {
    pub(crate) side: LegKind,
    pub(crate) endpoint: Arc<UpstreamEndpoint>,
    pub(crate) error: LegError,
    /// The engine of the other leg, if it is to be avoided too.
    pub(crate) other_engine: Option<Arc<UpstreamEndpoint>>,
    /// A prefill whose facts may be stale.
    pub(crate) stale_prefill: Option<FleetMember>,
    /// Span of the failed leg, to which the next attempt's spans are linked.
    pub(crate) leg: Option<SpanContext>,
    /// Value of the engine's `Retry-After`.
    pub(crate) retry_after: Option<Duration>,
}

impl AttemptFailure {
    /// The failure of an attempt whose prefill engine cannot serve it.
    pub(crate) fn unusable_prefill(prefill: &FleetMember, what: &'static str) -> Self {
        Self {
            side: LegKind::Prefill,
            endpoint: prefill.endpoint.clone(),
            error: LegError::ProtocolViolation(what),
            other_engine: None,
            stale_prefill: None,
            leg: None,
            retry_after: None,
        }
    }

    /// The failure of an attempt on an engine that has not loaded the request's LoRA adapter.
    pub(crate) fn unloaded_adapter(side: LegKind, member: &FleetMember, error: AdapterLoadError) -> Self {
        Self {
            side,
            endpoint: member.endpoint.clone(),
            error: LegError::AdapterLoad(error),
            other_engine: None,
            stale_prefill: None,
            leg: None,
            retry_after: None,
        }
    }

    /// The failure of a leg.
    pub(super) fn of_leg(pair: &mut LegPair, side: LegKind, error: LegError) -> Self {
        let leg = pair.record_failure(side, &error);
        let retry_after = pair.retry_after(side);
        Self {
            side,
            endpoint: pair.endpoint(side),
            error,
            other_engine: None,
            stale_prefill: None,
            leg,
            retry_after,
        }
    }

    /// The failure of an attempt that gives up these legs; there is at least one.
    pub(super) fn of_silence(pair: &mut LegPair, legs: SilentLegs) -> Self {
        let silence = legs.first().map_or(Duration::ZERO, |leg| leg.silence());
        let mut failure = match legs.first() {
            Some(leg) => Self::of_leg(pair, leg.side, LegError::Silent(silence)),
            None => Self::of_main(pair, LegError::Silent(silence)),
        };
        failure.other_engine = legs.get(1).map(|leg| leg.endpoint.clone());
        failure
    }

    /// The failure of the leg that answers the client.
    pub(super) fn of_main(pair: &mut LegPair, error: LegError) -> Self {
        Self::of_leg(pair, pair.main_kind(), error)
    }

    /// The failure of a leg whose events are malformed.
    pub(super) fn of_events(pair: &mut LegPair, error: SseError) -> Self {
        Self::of_main(pair, LegError::from(error))
    }
}

/// The error code for a failure of `side`.
pub(crate) fn failure_code(side: LegKind, error: &LegError) -> ApiErrorCode {
    match (error, side) {
        (LegError::Timeout(..) | LegError::Silent(_), _) => ApiErrorCode::EngineTimeout,
        (LegError::NoConnectionLeft, _) => ApiErrorCode::GatewayOverloaded,
        (LegError::AdapterLoad(_), _) => ApiErrorCode::AdapterLoadFailed,
        (LegError::Status(StatusCode::SERVICE_UNAVAILABLE, _), _) => ApiErrorCode::EngineUnavailable,
        (_, LegKind::Prefill) => ApiErrorCode::PrefillFailed,
        (_, LegKind::Decode) => ApiErrorCode::DecodeFailed,
        (_, LegKind::Worker) => ApiErrorCode::WorkerFailed,
    }
}
