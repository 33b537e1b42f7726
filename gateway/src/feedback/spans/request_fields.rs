//! What is known of a request, and how its trace tells it.

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
use crate::relay::{ResponseFinish, TokenUsage};
use crate::request_body::InferenceApi;

/// What is known of a request.
#[derive(Debug)]
pub(super) struct RequestSpanFields {
    pub(super) api: InferenceApi,
    /// Method and path of a request that is passed through.
    pub(super) passthrough: Option<Box<(Method, Uri)>>,
    pub(super) body_read: BodyReadState,
    pub(super) prediction: Option<PredictionSpan>,
    /// Hardly ever more than one, but samples of a request are decided at the same time.
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

/// What is only known at the end, and only kept if the trace is exported.
#[derive(Debug, Default)]
pub(super) struct RequestEndFields {
    pub(super) request_id: Option<HeaderValue>,
    pub(super) chunks: u64,
    pub(super) finish: ResponseFinish,
}

impl RequestSpanFields {
    /// What is known at the start.
    pub(super) fn new(api: InferenceApi, request: &Request<Body>) -> Self {
        let passed = api.path().is_none().then(|| (request.method().clone(), request.uri().clone()));
        Self {
            api,
            passthrough: passed.map(Box::new),
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

    /// When a request that came at `start` could be decided on.
    fn ready_at(&self, start: Instant) -> Instant {
        let read = match self.body_read {
            BodyReadState::Ended(read) => read,
            BodyReadState::Pending | BodyReadState::Reading => start,
        };
        self.prediction.as_ref().and_then(|prediction| prediction.end).unwrap_or(read)
    }
}

/// How far the request is read.
#[derive(Debug, Clone, Copy)]
pub(super) enum BodyReadState {
    Pending,
    Reading,
    Ended(Instant),
}

/// Predicting cache hits.
#[derive(Debug)]
pub(super) struct PredictionSpan {
    pub(super) start: Instant,
    pub(super) end: Option<Instant>,
    /// Tokens of the prompt and who made them, or why there is no prediction.
    pub(super) result: Option<Result<(u32, TokenSource), &'static str>>,
}

impl SpanAttributes for RequestSpanFields {
    fn write_attributes(&self, notes: &mut AttributeWriter<'_>) {
        if let Some(id) = self.end.as_ref().and_then(|end| end.request_id.as_ref()) {
            notes.set("moongate.request_id", id.to_str().unwrap_or_default());
        }
        self.write_request(notes);
        self.write_response(notes);
    }

    fn write_children(&self, steps: &mut ChildSpans<'_>) {
        let (start, end) = (steps.start(), steps.end());
        let RequestSpanFields { body_read: reading, prediction, decisions, first_chunk: first_piece, .. } =
            self;
        match *reading {
            BodyReadState::Pending => {}
            BodyReadState::Reading => steps.add("prompt", (start, end), |_| ()),
            BodyReadState::Ended(read) => steps.add("prompt", (start, read), |_| ()),
        }
        if let Some(PredictionSpan { start, end: ended, result: found }) = prediction {
            steps.add("predict", (*start, ended.unwrap_or(end)), |notes| match found {
                Some(Ok((input_tokens, by))) => {
                    notes.set("moongate.input_tokens", *input_tokens);
                    notes.set("moongate.tokenized_by", by.as_str());
                }
                Some(Err(unknown)) => notes.set("moongate.unpredicted", *unknown),
                None => {}
            });
        }
        let ready = self.ready_at(start);
        decisions.lock().iter().for_each(|decided| decided.write_span(ready, steps));
        if let Some((first_piece, _)) = first_piece {
            let pieces = self.end.as_ref().map_or(0, |end| end.chunks);
            steps.add("relay", (*first_piece, end), |notes| notes.set("moongate.pieces", pieces));
        }
    }
}

impl RequestSpanFields {
    fn write_request(&self, notes: &mut AttributeWriter<'_>) {
        let passed = self.passthrough.as_ref().map(|passed| (passed.0.as_str(), passed.1.path()));
        let (method, path) = passed.unwrap_or(("POST", self.api.path().unwrap_or_default()));
        notes.set(attribute_names::HTTP_REQUEST_METHOD, method);
        notes.set(attribute_names::URL_PATH, path);
        if let Some(bytes) = self.body_bytes {
            notes.set("http.request.body.size", bytes);
        }
        if let Some(tokens) = self.estimated_input_tokens {
            notes.set("moongate.estimated_input_tokens", tokens);
        }
        if let Some(operation) = operation_name(self.api) {
            notes.set(attribute_names::GEN_AI_OPERATION_NAME, operation);
        }
        if let Some(model) = &self.model {
            notes.set(attribute_names::GEN_AI_REQUEST_MODEL, &**model);
        }
        if let Some(stream) = self.stream {
            notes.set(attribute_names::GEN_AI_REQUEST_STREAM, stream);
        }
        if let Some(most) = self.max_output_tokens {
            notes.set(attribute_names::GEN_AI_REQUEST_MAX_TOKENS, most);
        }
        if let Some(hits) = self.predicted {
            notes.set("moongate.predicted.l1_tokens", hits.l1_tokens);
            notes.set("moongate.predicted.l2_tokens", hits.l2_tokens);
            notes.set("moongate.predicted.l3_tokens", hits.l3_tokens);
        }
    }

    fn write_response(&self, notes: &mut AttributeWriter<'_>) {
        if let Some((_, after)) = self.first_chunk {
            notes.set(attribute_names::GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, after.as_secs_f64());
        }
        if let Some(usage) = self.usage {
            notes.set(attribute_names::GEN_AI_USAGE_INPUT_TOKENS, usage.prompt_tokens);
            notes.set(attribute_names::GEN_AI_USAGE_OUTPUT_TOKENS, usage.completion_tokens);
            if let Some(cached) = usage.cached_tokens {
                notes.set(attribute_names::GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, cached);
            }
        }
        if let Some(status) = self.status {
            notes.set(attribute_names::HTTP_RESPONSE_STATUS_CODE, status.as_u16());
        }
        if let Some(error) = self.error {
            notes.set(attribute_names::ERROR_TYPE, error);
        }
        if let Some(RequestEndFields { finish: ResponseFinish { id, finish_reasons }, .. }) =
            self.end.as_deref()
        {
            if let Some(id) = id {
                notes.set(attribute_names::GEN_AI_RESPONSE_ID, id.as_str());
            }
            if !finish_reasons.is_empty() {
                notes.list(attribute_names::GEN_AI_RESPONSE_FINISH_REASONS, finish_reasons);
            }
        }
    }
}

/// `gen_ai.operation_name.name`
pub(super) const fn operation_name(api: InferenceApi) -> Option<&'static str> {
    match api {
        InferenceApi::Chat => Some("chat"),
        InferenceApi::Completions => Some("text_completion"),
        InferenceApi::Generate => Some("generate_content"),
        InferenceApi::Other => None,
    }
}
