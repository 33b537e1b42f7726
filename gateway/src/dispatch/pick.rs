//! Picks the route of a request that another proxy sends to the engine.

use std::sync::Arc;

use parking_lot::Mutex;

use super::dispatcher::{DispatchError, RequestDispatcher, RouteChoice, into_dispatch_error};
use crate::error::{ApiError, ApiErrorCode};
use crate::feedback::{AttemptTrace, RequestRecorder, RequestSpan};
use crate::fleet::UpstreamEndpoint;
use crate::legs::AttemptFailure;
use crate::routed_request::{PickScope, RoutedRequest};

/// A request with its route, counted as in flight.
#[derive(Debug)]
pub(crate) struct PickedRoute {
    pub(crate) routed: Box<RoutedRequest>,
    pub(crate) choice: RouteChoice,
    pub(crate) recorder: RequestRecorder,
}

/// Extension of a request that another proxy sends. Its route is put here, in place of a response.
#[derive(Debug, Clone)]
pub(crate) struct PickSlot {
    pub(crate) scope: PickScope,
    picked: Arc<Mutex<Option<Box<PickedRoute>>>>,
}

impl PickSlot {
    pub(crate) fn new(scope: PickScope) -> Self {
        Self { scope, picked: Arc::default() }
    }

    pub(crate) fn put(&self, picked: PickedRoute) {
        *self.picked.lock() = Some(Box::new(picked));
    }

    pub(crate) fn take(&self) -> Option<Box<PickedRoute>> {
        self.picked.lock().take()
    }
}

impl RequestDispatcher {
    /// Waits for a route whose engines have loaded the request's LoRA adapter.
    pub(crate) async fn pick(
        &self,
        routed: &RoutedRequest,
        span: &RequestSpan,
    ) -> Result<RouteChoice, DispatchError> {
        let mut tried: Vec<Arc<UpstreamEndpoint>> = Vec::new();
        let mut last: Option<AttemptFailure> = None;
        for number in 1..=self.limits.attempts.max(1) {
            let attempt = AttemptTrace { span, number, failed_leg: None };
            let choice = match (self.choose_route(routed, &tried, &attempt).await, last.take()) {
                (Ok(choice), _) => choice,
                (Err(_), Some(failure)) => return Err(into_dispatch_error(failure, number - 1)),
                (Err(rejection), None) => return Err(self.rejected(&rejection, routed)),
            };
            let Err(failure) = self.adapters.load_on_route(routed, &choice.chosen).await else {
                return Ok(choice);
            };
            self.record_failure(&failure, routed, span);
            if number >= self.limits.attempts {
                return Err(into_dispatch_error(failure, number));
            }
            tried.push(failure.endpoint.clone());
            last = Some(failure);
        }
        // Unreachable: the last iteration returns.
        Err(DispatchError::Error(ApiError::new(ApiErrorCode::NoEngineAvailable, "no attempt was made")))
    }
}
