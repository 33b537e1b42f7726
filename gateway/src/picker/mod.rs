//! Picks the engine of a request that another proxy sends, and observes the response: everything of the gateway but its own connections to
//! engines.

mod header_changes;
mod observed;
mod picked;

use std::fmt;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use moongate_runtime::listener::BoxError;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use crate::dispatch::PickSlot;
use crate::ingress::{GatewayContext, RequestChecks, public_router};
use crate::routed_request::PickScope;

pub use header_changes::HeaderChanges;
pub use observed::ObservedResponse;
pub use picked::PickedRequest;

/// The gateway's decisions and feedback, for a proxy that sends the requests itself.
#[derive(Clone)]
pub struct EndpointPicker {
    gateway: Arc<GatewayContext>,
    router: RequestChecks<Router>,
}

/// What a request has led to.
#[derive(Debug)]
pub enum PickOutcome {
    /// The proxy sends it to an engine.
    Picked(Box<PickedRequest>),
    /// The proxy responds with this: an error, or the response of a path that the gateway serves itself.
    Respond(Response<Body>),
}

impl EndpointPicker {
    pub(crate) fn new(gateway: Arc<GatewayContext>) -> Self {
        Self { router: public_router(gateway.clone()), gateway }
    }

    /// Reads a request, and waits until it has a route. `endpoints`: the `host:port` of the engines that the proxy allows; `None` for all.
    /// Dropping the future leaves the queue.
    pub async fn pick<B>(&self, request: Request<B>, endpoints: Option<Vec<String>>) -> PickOutcome
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let mut request = request.map(Body::new);
        let client_headers = request.headers().clone();
        let slot = PickSlot::new(PickScope::new(endpoints));
        request.extensions_mut().insert(slot.clone());
        let response = match self.router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        match slot.take() {
            Some(route) => {
                let picked = PickedRequest::new(self.gateway.clone(), *route, client_headers);
                PickOutcome::Picked(Box::new(picked))
            }
            None => PickOutcome::Respond(response),
        }
    }

    /// Whether some engine can serve requests, and the picker is not shutting down.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.gateway.dispatcher.fleet.current().can_serve() && !self.gateway.draining.is_cancelled()
    }

    /// Cancelled when the drain's deadline has passed: requests must end.
    #[must_use]
    pub fn force_close(&self) -> CancellationToken {
        self.gateway.force_close.clone()
    }
}

impl fmt::Debug for EndpointPicker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointPicker").finish_non_exhaustive()
    }
}
