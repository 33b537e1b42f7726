//! From what the engines have started to send to the client's response.

use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, CONNECTION,
    CONTENT_LENGTH, PROXY_AUTHENTICATE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, Response};
use moongate_runtime::listener::RequestRead;
use tokio_util::sync::CancellationToken;

use super::merge::{SampleResponse, merge_complete, merge_stream};
use super::response_feedback::ResponseFeedback;
use super::stream::{RelayContext, ResponseRelay};
use crate::decide::InFlightGuard;
use crate::error::ApiError;
use crate::feedback::RequestRecorder;
use crate::legs::{LegPair, ResponsePayload, ResponseStart};
use crate::request_body::InferenceApi;
use crate::response::{ResponseEvents, ResponseSummary, TokenUsage};

/// What the dispatcher has brought back for one request.
#[derive(Debug)]
pub(crate) enum DispatchedResponse {
    Single(Box<ResponseStart>),
    /// The streams of all samples of a request with `n` > 1.
    Samples(Response<()>, Vec<SampleResponse>),
    /// The merged non-streamed responses of all samples.
    Merged(Response<()>, Bytes),
}

/// Properties of a request that its response depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RelayedRequest<'a> {
    pub(crate) api: InferenceApi,
    pub(crate) model: Option<&'a Arc<str>>,
    /// Whether the client wants a stream.
    pub(crate) stream: bool,
    /// Cancelled when the drain's deadline has passed.
    pub(crate) force_close: &'a CancellationToken,
}

impl DispatchedResponse {
    /// The responses to the samples of one request: streams to be merged, or the merged non-streamed responses.
    pub(crate) async fn of_samples(
        request: RelayedRequest<'_>,
        started: impl IntoIterator<Item = Box<ResponseStart>>,
    ) -> Result<Self, ApiError> {
        let mut head = Response::new(());
        let samples = started.into_iter().map(|started| {
            head = started.head;
            match started.payload {
                ResponsePayload::Complete(body, _) => SampleResponse::Complete(body),
                ResponsePayload::Streaming { pair, first, events } => {
                    SampleResponse::Streaming(relay(request, (pair, first, events), started.in_flight, None))
                }
            }
        });
        let samples = samples.collect();
        to_client(head.headers_mut());
        if request.stream {
            return Ok(Self::Samples(head, samples));
        }
        merge_complete(request.api, samples).await.map(|body| Self::Merged(head, body))
    }

    /// The response to the client. Its body drives the engines' streams, and records the end of the request.
    pub(crate) fn respond(
        self,
        request: RelayedRequest<'_>,
        mut recorder: RequestRecorder,
    ) -> Response<Body> {
        match self {
            Self::Single(started) => respond_single(request, started, recorder),
            Self::Samples(head, samples) => {
                recorder.span().set_status(head.status());
                streamed(head, Body::new(merge_stream(request.api, samples, recorder)))
            }
            Self::Merged(head, body) => {
                recorder.span().set_status(head.status());
                recorder.set_sample_of_batch();
                recorder.completed(TokenUsage::read(&body), None, &body, |finish| {
                    finish.add(&ResponseSummary::read(&body));
                });
                head.map(|()| Body::from(body))
            }
        }
    }
}

fn respond_single(
    request: RelayedRequest<'_>,
    started: Box<ResponseStart>,
    mut recorder: RequestRecorder,
) -> Response<Body> {
    let ResponseStart { mut head, payload, in_flight, expected_hits, ttft_prediction, prefill_usage } =
        *started;
    recorder.set_prefill(in_flight.prefill_endpoint().clone());
    if let (Some(expected), Some(model)) = (expected_hits, request.model) {
        recorder.set_expected_hits(expected, model.clone());
    }
    recorder.span().set_status(head.status());
    to_client(head.headers_mut());
    match payload {
        ResponsePayload::Complete(body, usage) => {
            let mut feedback = ResponseFeedback { events: None, in_flight, recorder: Some(recorder) };
            feedback.record_body_complete(&body, usage, prefill_usage);
            head.map(|()| Body::from(body))
        }
        ResponsePayload::Streaming { pair, first, events } => {
            recorder.set_ttft_prediction(ttft_prediction.filter(|_| events.is_some()));
            streamed(head, Body::new(relay(request, (pair, first, events), in_flight, Some(recorder))))
        }
    }
}

/// The listener streams the body with little memory, since requests are dispatched only when their bodies are complete.
fn streamed(mut head: Response<()>, body: Body) -> Response<Body> {
    head.extensions_mut().insert(RequestRead);
    head.map(|()| body)
}

fn relay(
    request: RelayedRequest<'_>,
    (pair, first, events): (Box<LegPair>, Bytes, Option<ResponseEvents>),
    in_flight: InFlightGuard,
    recorder: Option<RequestRecorder>,
) -> ResponseRelay {
    let context = RelayContext {
        feedback: ResponseFeedback { events, in_flight, recorder },
        error_format: request.api.error_format(),
        force_close: Box::pin(request.force_close.clone().cancelled_owned()),
    };
    ResponseRelay::new(pair, first, context)
}

/// Removes what clients do not get of an engine's response headers. The server sets length and framing, and the gateway decides
/// which origins may read the response: both engines allow all of them.
pub(crate) fn to_client(headers: &mut HeaderMap) {
    for name in [
        CONNECTION,
        HeaderName::from_static("keep-alive"),
        PROXY_AUTHENTICATE,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
        CONTENT_LENGTH,
        ACCESS_CONTROL_ALLOW_CREDENTIALS,
        ACCESS_CONTROL_ALLOW_ORIGIN,
        ACCESS_CONTROL_EXPOSE_HEADERS,
    ] {
        headers.remove(name);
    }
}
