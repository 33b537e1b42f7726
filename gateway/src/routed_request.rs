//! One client request, read and checked, as the steps after `ingress` need it.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use moongate_discovery::{EngineRole, InstanceId};
use moongate_scheduler::RequestProfile;

use crate::error::ApiError;
use crate::feedback::{PromptHint, RequestDescription};
use crate::fleet::{FleetMember, UpstreamEndpoint};
use crate::model_aliases::AliasedModel;
use crate::predict::PromptPrediction;
use crate::request_body::{InferenceApi, RoutingFields, SplicedBody};
use crate::sessions::SessionRoute;
use crate::upstream::PreparedRequest;

/// A request that is to be routed.
#[derive(Debug)]
pub(crate) struct RoutedRequest {
    /// The request id in the client's response and in logs.
    pub(crate) id: HeaderValue,
    pub(crate) api: InferenceApi,
    pub(crate) method: Method,
    /// Path and query as the client sent them.
    pub(crate) uri: Uri,
    /// The client's headers without hop-by-hop headers, and with its request id.
    pub(crate) headers: Arc<HeaderMap>,
    pub(crate) body: Bytes,
    pub(crate) routing: RoutingFields<'static>,
    /// The scheduler's view of the request; `None` on passed-through paths without a model.
    pub(crate) request: Option<RequestProfile>,
    /// The client's hint whether the prompt's prefix will be used again.
    pub(crate) return_hint: Option<PromptHint>,
    /// Where the session's last request went.
    pub(crate) session_route: Option<SessionRoute>,
    /// How it refers to responses that are stored.
    pub(crate) stored: StoredResponseUse,
    /// The same request in an API that more engines have, if some of the fleet need it; or why there is none.
    pub(crate) translated: Option<Result<Arc<RoutedRequest>, ApiError>>,
    /// Predicted cache hits of each engine, if available.
    pub(crate) prompt_prediction: Option<PromptPrediction>,
    /// Name of the served model, for logs and metrics.
    pub(crate) model: Option<Arc<str>>,
    /// The alias by which the client named the model.
    pub(crate) alias: Option<Box<AliasedModel>>,
    /// Set if another proxy sends the request to the engine.
    pub(crate) pick_scope: Option<PickScope>,
}

/// The engines among which another proxy lets a route be picked. It sends the request and gets the response, so that neither can be
/// translated.
#[derive(Debug, Clone, Default)]
pub(crate) struct PickScope {
    /// Their `host:port`; `None`: all engines.
    endpoints: Option<Arc<[String]>>,
}

impl PickScope {
    pub(crate) fn new(endpoints: Option<Vec<String>>) -> Self {
        Self { endpoints: endpoints.map(Into::into) }
    }

    pub(crate) fn is_restricted(&self) -> bool {
        self.endpoints.is_some()
    }

    pub(crate) fn contains(&self, endpoint: &UpstreamEndpoint) -> bool {
        let is_it = |listed: &String| listed == endpoint.pool.authority();
        self.endpoints.as_ref().is_none_or(|endpoints| endpoints.iter().any(is_it))
    }
}

/// How a request refers to stored responses.
#[derive(Debug, Clone, Default)]
pub(crate) struct StoredResponseUse {
    /// The engine that has the response to which the request refers.
    pub(crate) engine: Option<InstanceId>,
    /// The items of the conversation so far, if the response is to be stored.
    pub(crate) input_items: Option<Bytes>,
}

impl RoutedRequest {
    /// Whether only an engine that stored a response can serve the request.
    pub(crate) fn needs_stored_response(&self) -> bool {
        self.api == InferenceApi::Responses && self.routing.previous_response_id.is_some()
    }

    /// The request that the engines of a pair with this prefill get instead; `None` if they have the client's API.
    pub(crate) fn translated_for(&self, prefill: &FleetMember) -> Option<&RoutedRequest> {
        if !needs_translation(self.api, prefill) {
            return None;
        }
        self.translated.as_ref()?.as_deref().ok()
    }

    /// The request as traces describe it.
    pub(crate) fn description(&self) -> RequestDescription<'_> {
        RequestDescription {
            body_bytes: self.body.len(),
            estimated_input_tokens: self.request.as_ref().map(|request| request.input_tokens),
            model: self.model.as_ref(),
            stream: self.routing.stream,
            max_output_tokens: self.routing.max_output_tokens,
        }
    }

    /// The client's request for an engine, with `body` and `extra` headers.
    pub(crate) fn prepare(
        &self,
        body: SplicedBody,
        extra: Vec<(HeaderName, HeaderValue)>,
    ) -> PreparedRequest {
        let headers = self.headers.clone();
        PreparedRequest {
            method: self.method.clone(),
            uri: self.uri.clone(),
            headers,
            extra_headers: extra,
            body,
        }
    }
}

#[cfg(test)]
impl RoutedRequest {
    /// A request with this body, without a model.
    pub(crate) fn of_body(api: InferenceApi, body: &'static str) -> Self {
        let body = Bytes::from_static(body.as_bytes());
        let routing = RoutingFields::read(api, &body).unwrap().without_model();
        Self {
            id: HeaderValue::from_static("a"),
            api,
            method: Method::POST,
            uri: Uri::from_static("/"),
            headers: Arc::default(),
            body,
            routing,
            request: None,
            return_hint: None,
            session_route: None,
            stored: StoredResponseUse::default(),
            translated: None,
            prompt_prediction: None,
            model: None,
            alias: None,
            pick_scope: None,
        }
    }
}

/// Whether an engine needs a request of this API as a chat: older SGLangs do not take a pair's members in Messages.
pub(crate) fn needs_translation(api: InferenceApi, engine: &FleetMember) -> bool {
    api == InferenceApi::Messages
        && engine.instance.role != EngineRole::Plain
        && engine.facts().is_some_and(|facts| !facts.pairs_serve_messages)
}

/// 128 random bits as a UUID.
pub(crate) fn random_uuid() -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut bits = fastrand::u128(..);
    let mut uuid = String::with_capacity(36);
    while uuid.len() < 36 {
        if matches!(uuid.len(), 8 | 13 | 18 | 23) {
            uuid.push('-');
        }
        uuid.push(char::from(DIGITS[(bits & 15) as usize]));
        bits >>= 4;
    }
    uuid
}
