//! Attributes of a request's span.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use moongate_scheduler::TierHits;
use moongate_telemetry::{AttributeWriter, ChildSpans, SpanAttributes, attribute_names};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::decision::DecisionSpan;
use crate::feedback::TokenSource;
use crate::request_body::InferenceApi;
use crate::response::{ResponseFinish, TokenUsage};

/// Attributes of a request's span.
#[derive(Debug)]
pub(super) struct RequestSpanFields {
    pub(super) api: InferenceApi,
    /// Method and path of a passed-through request.
    pub(super) passthrough: Option<Box<(Method, Uri)>>,
    pub(super) body_read: BodyReadState,
    pub(super) prediction: Option<PredictionSpan>,
    /// Rarely more than one, but samples of a request are decided concurrently.
    pub(super) decisions: Mutex<SmallVec<[DecisionSpan; 1]>>,
    pub(super) body_bytes: Option<usize>,
    pub(super) estimated_input_tokens: Option<u32>,
    pub(super) model: Option<Arc<str>>,
    pub(super) stream: Option<bool>,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) predicted: Option<TierHits>,
    pub(super) first_chunk: Option<(Instant, Duration)>,
    pub(super) usage: Option<TokenUsage>,
    pub(super) status: Option<StatusCode>,
    pub(super) error: Option<&'static str>,
    pub(super) end: Option<Box<RequestEndFields>>,
}

/// Only known at the end, and only stored if the trace is exported.
#[derive(Debug, Default)]
pub(super) struct RequestEndFields {
    pub(super) request_id: Option<HeaderValue>,
    pub(super) chunks: u64,
    pub(super) finish: ResponseFinish,
}

impl RequestSpanFields {
    /// Attributes known at the start.
    pub(super) fn new(api: InferenceApi, request: &Request<Body>) -> Self {
        let passthrough = api.path().is_none().then(|| (request.method().clone(), request.uri().clone()));
        Self {
            api,
            passthrough: passthrough.map(Box::new),
            body_read: BodyReadState::Pending,
            prediction: None,
            decisions: Mutex::default(),
            body_bytes: None,
            estimated_input_tokens: None,
            model: None,
            stream: None,
            max_output_tokens: None,
            predicted: None,
            first_chunk: None,
            usage: None,
            status: None,
            error: None,
            end: None,
        }
    }

    /// When a request that arrived at `start` was ready for its decision.
    fn ready_at(&self, start: Instant) -> Instant {
        let read = match self.body_read {
            BodyReadState::Ended(read) => read,
            BodyReadState::Pending | BodyReadState::Reading => start,
        };
        self.prediction.as_ref().and_then(|prediction| prediction.end).unwrap_or(read)
    }
}

/// Progress of reading the request's body.
#[derive(Debug, Clone, Copy)]
pub(super) enum BodyReadState {
    Pending,
    Reading,
    Ended(Instant),
}

#[derive(Debug)]
pub(super) struct PredictionSpan {
    pub(super) start: Instant,
    pub(super) end: Option<Instant>,
    /// Number of prompt tokens and their source, or why there is no prediction.
    pub(super) result: Option<Result<(u32, TokenSource), &'static str>>,
}

impl SpanAttributes for RequestSpanFields {
    fn write_attributes(&self, attributes: &mut AttributeWriter<'_>) {
        if let Some(id) = self.end.as_ref().and_then(|end| end.request_id.as_ref()) {
            attributes.set("moongate.request_id", id.to_str().unwrap_or_default());
        }
        self.write_request(attributes);
        self.write_response(attributes);
    }

    fn write_children(&self, children: &mut ChildSpans<'_>) {
        let (start, end) = (children.start(), children.end());
        let RequestSpanFields { body_read, prediction, decisions, first_chunk, .. } = self;
        match *body_read {
            BodyReadState::Pending => {}
            BodyReadState::Reading => children.add("read body", (start, end), |_| ()),
            BodyReadState::Ended(read) => children.add("read body", (start, read), |_| ()),
        }
        if let Some(PredictionSpan { start, end: ended, result }) = prediction {
            children.add("predict", (*start, ended.unwrap_or(end)), |attributes| match result {
                Some(Ok((input_tokens, source))) => {
                    attributes.set("moongate.input_tokens", *input_tokens);
                    attributes.set("moongate.tokenized_by", source.as_str());
                }
                Some(Err(error)) => attributes.set("moongate.prediction.error", *error),
                None => {}
            });
        }
        let ready = self.ready_at(start);
        decisions.lock().iter().for_each(|decision| decision.write_span(ready, children));
        if let Some((first_chunk, _)) = first_chunk {
            let chunks = self.end.as_ref().map_or(0, |end| end.chunks);
            children
                .add("relay", (*first_chunk, end), |attributes| attributes.set("moongate.chunks", chunks));
        }
    }
}

impl RequestSpanFields {
    fn write_request(&self, attributes: &mut AttributeWriter<'_>) {
        let passthrough =
            self.passthrough.as_ref().map(|passthrough| (passthrough.0.as_str(), passthrough.1.path()));
        let (method, path) = passthrough.unwrap_or(("POST", self.api.path().unwrap_or_default()));
        attributes.set(attribute_names::HTTP_REQUEST_METHOD, method);
        attributes.set(attribute_names::URL_PATH, path);
        if let Some(bytes) = self.body_bytes {
            attributes.set("http.request.body.size", bytes);
        }
        if let Some(tokens) = self.estimated_input_tokens {
            attributes.set("moongate.estimated_input_tokens", tokens);
        }
        if let Some(operation) = operation_name(self.api) {
            attributes.set(attribute_names::GEN_AI_OPERATION_NAME, operation);
        }
        if let Some(model) = &self.model {
            attributes.set(attribute_names::GEN_AI_REQUEST_MODEL, &**model);
        }
        if let Some(stream) = self.stream {
            attributes.set(attribute_names::GEN_AI_REQUEST_STREAM, stream);
        }
        if let Some(max_tokens) = self.max_output_tokens {
            attributes.set(attribute_names::GEN_AI_REQUEST_MAX_TOKENS, max_tokens);
        }
        if let Some(hits) = self.predicted {
            attributes.set("moongate.predicted.l1_tokens", hits.l1_tokens);
            attributes.set("moongate.predicted.l2_tokens", hits.l2_tokens);
            attributes.set("moongate.predicted.l3_tokens", hits.l3_tokens);
        }
    }

    fn write_response(&self, attributes: &mut AttributeWriter<'_>) {
        if let Some((_, after)) = self.first_chunk {
            attributes.set(attribute_names::GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, after.as_secs_f64());
        }
        if let Some(usage) = self.usage {
            attributes.set(attribute_names::GEN_AI_USAGE_INPUT_TOKENS, usage.prompt_tokens);
            attributes.set(attribute_names::GEN_AI_USAGE_OUTPUT_TOKENS, usage.completion_tokens);
            if let Some(cached) = usage.cached_tokens {
                attributes.set(attribute_names::GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, cached);
            }
        }
        if let Some(status) = self.status {
            attributes.set(attribute_names::HTTP_RESPONSE_STATUS_CODE, status.as_u16());
        }
        if let Some(error) = self.error {
            attributes.set(attribute_names::ERROR_TYPE, error);
        }
        if let Some(RequestEndFields { finish: ResponseFinish { id, finish_reasons }, .. }) =
            self.end.as_deref()
        {
            if let Some(id) = id {
                attributes.set(attribute_names::GEN_AI_RESPONSE_ID, id.as_str());
            }
            if !finish_reasons.is_empty() {
                attributes.list(attribute_names::GEN_AI_RESPONSE_FINISH_REASONS, finish_reasons);
            }
        }
    }
}

/// Value of the attribute `gen_ai.operation.name`.
pub(super) const fn operation_name(api: InferenceApi) -> Option<&'static str> {
    match api {
        InferenceApi::Chat | InferenceApi::Responses | InferenceApi::Messages => Some("chat"),
        InferenceApi::Completions => Some("text_completion"),
        InferenceApi::Generate => Some("generate_content"),
        InferenceApi::Other => None,
    }
}
