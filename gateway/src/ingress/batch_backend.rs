//! Runs lines of batches as requests of their tenants, like those of clients but with the lowest priority.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt as _, Limited};
use moongate_batch::{BackendFailure, BackendResponse, BatchEndpoint, InferenceBackend, LineRequest};
use moongate_runtime::Supervisor;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::handler::{GatewayContext, handle};
use super::headers::REQUEST_ID;
use super::tenant_priority::RequestPriority;
use crate::access::{AccessScope, AuthenticatedCaller};
use crate::request_body::InferenceApi;

/// Largest response to a line.
const MAX_RESPONSE_BYTES: usize = 32 << 20;

/// Owner of files and batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BatchTenant {
    /// Clients are not distinguished.
    Shared,
    /// Tenant of a key or token.
    Authenticated(String),
    /// Value of the tenant header, which a proxy sets.
    Named(HeaderValue),
}

impl BatchTenant {
    /// Of a request. The header `authorization` does not name a tenant: secrets are not stored.
    pub(super) fn of<B>(gateway: &GatewayContext, request: &Request<B>) -> Self {
        if let Some(caller) = request.extensions().get::<AuthenticatedCaller>() {
            return Self::Authenticated(caller.tenant.as_ref().to_owned());
        }
        let header = gateway.priority_headers.tenant.as_ref().filter(|name| **name != AUTHORIZATION);
        let value = header.and_then(|name| request.headers().get(name));
        value.map_or(Self::Shared, |value| Self::Named(value.clone()))
    }

    /// The tenant as it is stored.
    pub(super) fn encode(&self) -> String {
        match self {
            Self::Shared => String::new(),
            Self::Authenticated(name) => format!("key:{name}"),
            Self::Named(value) => format!("header:{}", value.as_bytes().escape_ascii()),
        }
    }

    fn decode(text: &str) -> Self {
        if let Some(name) = text.strip_prefix("key:") {
            return Self::Authenticated(name.to_owned());
        }
        let value = text.strip_prefix("header:").and_then(|value| HeaderValue::from_str(value).ok());
        value.map_or(Self::Shared, Self::Named)
    }

    /// Makes a request one of the tenant, with its quotas and its share of the fleet.
    fn apply(&self, gateway: &GatewayContext, request: &mut Request<Body>) {
        match self {
            Self::Authenticated(name) => {
                let scopes = Arc::new(BTreeSet::from([AccessScope::Inference]));
                let caller = AuthenticatedCaller { tenant: name.as_str().into(), scopes };
                request.extensions_mut().insert(caller);
                return;
            }
            Self::Named(value) => {
                let name = gateway.priority_headers.tenant.clone();
                request.headers_mut().extend(name.map(|name| (name, value.clone())));
            }
            Self::Shared => {}
        }
        // Without a caller, engines get the client's key. It is not stored, so they get the gateway's own.
        request.headers_mut().extend(gateway.engine_key.clone().map(|key| (AUTHORIZATION, key)));
    }
}

/// The gateway itself as the backend of batches.
#[derive(Debug)]
pub(crate) struct GatewayBackend {
    pub(crate) gateway: Arc<GatewayContext>,
    pub(crate) supervisor: Supervisor,
}

impl InferenceBackend for GatewayBackend {
    fn load(&self) -> f64 {
        if self.gateway.draining.is_cancelled() {
            return f64::INFINITY;
        }
        self.gateway.dispatcher.admission.background_load()
    }

    async fn send(&self, line: LineRequest) -> Result<BackendResponse, BackendFailure> {
        let (sender, receiver) = oneshot::channel();
        let aborted = CancellationToken::new();
        let (gateway, is_aborted) = (self.gateway.clone(), aborted.clone());
        // A task of its own, so that a panic ends only this line.
        self.supervisor.spawn("batch-line", async move {
            let response = is_aborted.run_until_cancelled(send_line(&gateway, line)).await;
            // Without a receiver, the line was aborted.
            drop(response.map(|response| sender.send(response)));
        });
        let _abort = aborted.drop_guard();
        receiver
            .await
            .unwrap_or_else(|_| Err(BackendFailure("the request ended without a response".to_owned())))
    }
}

async fn send_line(gateway: &GatewayContext, line: LineRequest) -> Result<BackendResponse, BackendFailure> {
    let api = match line.endpoint {
        BatchEndpoint::ChatCompletions => InferenceApi::Chat,
        BatchEndpoint::Completions => InferenceApi::Completions,
        BatchEndpoint::Responses => InferenceApi::Responses,
        BatchEndpoint::Messages => InferenceApi::Messages,
        BatchEndpoint::Embeddings => InferenceApi::Other,
    };
    let mut request = Request::new(Body::from(line.body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = http::Uri::from_static(line.endpoint.path());
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request.headers_mut().extend(HeaderValue::from_str(&line.request_id).ok().map(|id| (REQUEST_ID, id)));
    request.extensions_mut().insert(RequestPriority::LOWEST);
    BatchTenant::decode(&line.tenant).apply(gateway, &mut request);
    let (head, body) = Box::pin(handle(gateway, api, request)).await.into_parts();
    let collected = Limited::new(body, MAX_RESPONSE_BYTES).collect().await;
    let body =
        collected.map_err(|error| BackendFailure(format!("the response is incomplete: {error}")))?.to_bytes();
    let response = Response::from_parts(head, ());
    Ok(BackendResponse { status: response.status().as_u16(), retry_after: retry_after(&response), body })
}

fn retry_after(response: &Response<()>) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_are_stored_and_read() {
        let tenants = [
            BatchTenant::Shared,
            BatchTenant::Authenticated("header:x".to_owned()),
            BatchTenant::Named(HeaderValue::from_static("key:x")),
        ];
        for tenant in &tenants {
            assert_eq!(&BatchTenant::decode(&tenant.encode()), tenant);
        }
        let named = BatchTenant::Named(HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(named.encode(), "header:\\xff");
    }
}
