//! What is known of a request, and how its trace tells it.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use moongate_scheduler::TierHits;
use moongate_telemetry::{Notes, Steps, Tell, names};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::decision::Decided;
use crate::feedback::TokenizedBy;
use crate::prompt::Api;
use crate::relay::{Ending, Usage};

/// What is known of a request.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) api: Api,
    /// Method and path of a request that is passed through.
    pub(super) passed: Option<Box<(Method, Uri)>>,
    pub(super) reading: Reading,
    pub(super) prediction: Option<Prediction>,
    /// Hardly ever more than one, but samples of a request are decided at the same time.
    pub(super) decisions: Mutex<SmallVec<[Decided; 1]>>,
    pub(super) body_bytes: Option<usize>,
    pub(super) estimated_input_tokens: Option<u32>,
    pub(super) model: Option<Arc<str>>,
    pub(super) stream: Option<bool>,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) predicted: Option<TierHits>,
    pub(super) first_piece: Option<(Instant, Duration)>,
    pub(super) usage: Option<Usage>,
    pub(super) status: Option<StatusCode>,
    pub(super) error: Option<&'static str>,
    pub(super) end: Option<Box<End>>,
}

/// What is only known at the end, and only kept if the trace is exported.
#[derive(Debug, Default)]
pub(super) struct End {
    pub(super) request_id: Option<HeaderValue>,
    pub(super) pieces: u64,
    pub(super) ending: Ending,
}

impl Facts {
    /// What is known at the start.
    pub(super) fn of(api: Api, request: &Request<Body>) -> Self {
        let passed = api.path().is_none().then(|| (request.method().clone(), request.uri().clone()));
        Self {
            api,
            passed: passed.map(Box::new),
            reading: Reading::NotBegun,
            prediction: None,
            decisions: Mutex::default(),
            body_bytes: None,
            estimated_input_tokens: None,
            model: None,
            stream: None,
            max_output_tokens: None,
            predicted: None,
            first_piece: None,
            usage: None,
            status: None,
            error: None,
            end: None,
        }
    }

    /// When a request that came at `start` could be decided on.
    fn ready_at(&self, start: Instant) -> Instant {
        let read = match self.reading {
            Reading::Ended(read) => read,
            Reading::NotBegun | Reading::Begun => start,
        };
        self.prediction.as_ref().and_then(|prediction| prediction.end).unwrap_or(read)
    }
}

/// How far the request is read.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reading {
    NotBegun,
    Begun,
    Ended(Instant),
}

/// Predicting cache hits.
#[derive(Debug)]
pub(super) struct Prediction {
    pub(super) start: Instant,
    pub(super) end: Option<Instant>,
    /// Tokens of the prompt and who made them, or why there is no prediction.
    pub(super) found: Option<Result<(u32, TokenizedBy), &'static str>>,
}

impl Tell for Facts {
    fn tell(&self, notes: &mut Notes<'_>) {
        if let Some(id) = self.end.as_ref().and_then(|end| end.request_id.as_ref()) {
            notes.set("moongate.request_id", id.to_str().unwrap_or_default());
        }
        self.tell_request(notes);
        self.tell_answer(notes);
    }

    fn steps(&self, steps: &mut Steps<'_>) {
        let (start, end) = (steps.start(), steps.end());
        let Facts { reading, prediction, decisions, first_piece, .. } = self;
        match *reading {
            Reading::NotBegun => {}
            Reading::Begun => steps.step("prompt", (start, end), |_| ()),
            Reading::Ended(read) => steps.step("prompt", (start, read), |_| ()),
        }
        if let Some(Prediction { start, end: ended, found }) = prediction {
            steps.step("predict", (*start, ended.unwrap_or(end)), |notes| match found {
                Some(Ok((input_tokens, by))) => {
                    notes.set("moongate.input_tokens", *input_tokens);
                    notes.set("moongate.tokenized_by", by.as_str());
                }
                Some(Err(unknown)) => notes.set("moongate.unpredicted", *unknown),
                None => {}
            });
        }
        let ready = self.ready_at(start);
        decisions.lock().iter().for_each(|decided| decided.tell(ready, steps));
        if let Some((first_piece, _)) = first_piece {
            let pieces = self.end.as_ref().map_or(0, |end| end.pieces);
            steps.step("relay", (*first_piece, end), |notes| notes.set("moongate.pieces", pieces));
        }
    }
}

impl Facts {
    fn tell_request(&self, notes: &mut Notes<'_>) {
        let passed = self.passed.as_ref().map(|passed| (passed.0.as_str(), passed.1.path()));
        let (method, path) = passed.unwrap_or(("POST", self.api.path().unwrap_or_default()));
        notes.set(names::HTTP_REQUEST_METHOD, method);
        notes.set(names::URL_PATH, path);
        if let Some(bytes) = self.body_bytes {
            notes.set("http.request.body.size", bytes);
        }
        if let Some(tokens) = self.estimated_input_tokens {
            notes.set("moongate.estimated_input_tokens", tokens);
        }
        if let Some(operation) = operation(self.api) {
            notes.set(names::GEN_AI_OPERATION_NAME, operation);
        }
        if let Some(model) = &self.model {
            notes.set(names::GEN_AI_REQUEST_MODEL, &**model);
        }
        if let Some(stream) = self.stream {
            notes.set(names::GEN_AI_REQUEST_STREAM, stream);
        }
        if let Some(most) = self.max_output_tokens {
            notes.set(names::GEN_AI_REQUEST_MAX_TOKENS, most);
        }
        if let Some(hits) = self.predicted {
            notes.set("moongate.predicted.l1_tokens", hits.l1_tokens);
            notes.set("moongate.predicted.l2_tokens", hits.l2_tokens);
            notes.set("moongate.predicted.l3_tokens", hits.l3_tokens);
        }
    }

    fn tell_answer(&self, notes: &mut Notes<'_>) {
        if let Some((_, after)) = self.first_piece {
            notes.set(names::GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, after.as_secs_f64());
        }
        if let Some(usage) = self.usage {
            notes.set(names::GEN_AI_USAGE_INPUT_TOKENS, usage.prompt_tokens);
            notes.set(names::GEN_AI_USAGE_OUTPUT_TOKENS, usage.completion_tokens);
            if let Some(cached) = usage.cached_tokens {
                notes.set(names::GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, cached);
            }
        }
        if let Some(status) = self.status {
            notes.set(names::HTTP_RESPONSE_STATUS_CODE, status.as_u16());
        }
        if let Some(error) = self.error {
            notes.set(names::ERROR_TYPE, error);
        }
        if let Some(End { ending: Ending { id, finish_reasons }, .. }) = self.end.as_deref() {
            if let Some(id) = id {
                notes.set(names::GEN_AI_RESPONSE_ID, id.as_str());
            }
            if !finish_reasons.is_empty() {
                notes.list(names::GEN_AI_RESPONSE_FINISH_REASONS, finish_reasons);
            }
        }
    }
}

/// `gen_ai.operation.name`
pub(super) const fn operation(api: Api) -> Option<&'static str> {
    match api {
        Api::Chat => Some("chat"),
        Api::Completions => Some("text_completion"),
        Api::Generate => Some("generate_content"),
        Api::Other => None,
    }
}
