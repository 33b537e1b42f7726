//! One exchange with the proxy: about one request and its response.

use std::collections::VecDeque;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap as EnvoyHeaders, Metadata};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Part;
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures_util::future::{BoxFuture, FutureExt as _, OptionFuture};
use http_body_util::{BodyExt as _, Collected, Limited};
use moongate_gateway::{
    ApiError, ApiErrorCode, EndpointPicker, ErrorFormat, ObservedResponse, PickOutcome, PickedRequest,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use crate::exchange::{AwaitedParts, Exchange, ExchangeStep};
use crate::messages::{self, MAX_CHUNK, ResponseBodyMode};
use crate::request_body::RequestBody;

/// Largest response of a path that the picker serves itself.
const MAX_OWN_RESPONSE: usize = 4 << 20;

/// What a pick has led to.
enum Picked {
    Route(Box<PickedRequest>),
    Response(Box<ProcessingResponse>),
}

/// The part of a request's body that is not sent back yet.
struct UnsentBody {
    rest: Bytes,
    parts: AwaitedParts,
    is_begun: bool,
}

pub(crate) struct PickSession {
    picker: EndpointPicker,
    fallbacks: usize,
    inbound: Streaming<ProcessingRequest>,
    exchange: Exchange,
    response_mode: ResponseBodyMode,
    /// Answers that are to be sent before anything else happens.
    answers: VecDeque<ProcessingResponse>,
    unsent: Option<UnsentBody>,
    pick: Option<BoxFuture<'static, Picked>>,
    body: Option<mpsc::Sender<Bytes>>,
    /// A chunk for which the reader of the body has no space yet.
    pending: Option<Bytes>,
    ends_body: bool,
    observed: Option<ObservedResponse>,
    force_close: CancellationToken,
    is_first: bool,
}

/// What happens next.
enum SessionEvent {
    Picked(Picked),
    ChunkTaken,
    /// The reader of the body has ended before the body.
    BodyRejected,
    Message(Result<Option<Box<ProcessingRequest>>, Status>),
    ForceClosed,
}

impl PickSession {
    pub(crate) fn new(
        picker: EndpointPicker,
        fallbacks: usize,
        inbound: Streaming<ProcessingRequest>,
    ) -> Self {
        Self {
            force_close: picker.force_close(),
            picker,
            fallbacks,
            inbound,
            exchange: Exchange::default(),
            response_mode: ResponseBodyMode::Duplex,
            answers: VecDeque::new(),
            unsent: None,
            pick: None,
            body: None,
            pending: None,
            ends_body: false,
            observed: None,
            is_first: true,
        }
    }

    /// The next message to the proxy; `None` when the exchange has ended. A session that is dropped before has been given up by the proxy:
    /// the request leaves the queue, or its engines count it no more.
    pub(crate) async fn next(&mut self) -> Option<Result<ProcessingResponse, Status>> {
        loop {
            if let Some(answer) = self.next_answer() {
                return Some(Ok(answer));
            }
            if self.exchange.has_ended() {
                return None;
            }
            let handled = match self.next_event().await {
                SessionEvent::Picked(picked) => {
                    self.picked(picked);
                    Ok(())
                }
                SessionEvent::ChunkTaken => {
                    if self.ends_body {
                        self.body = None;
                    }
                    Ok(())
                }
                SessionEvent::BodyRejected => {
                    (self.body, self.pending) = (None, None);
                    Ok(())
                }
                SessionEvent::Message(Ok(Some(message))) => self.receive(*message),
                SessionEvent::Message(Ok(None)) | SessionEvent::ForceClosed => return None,
                SessionEvent::Message(Err(status)) => Err(status),
            };
            if let Err(status) = handled {
                return Some(Err(status));
            }
        }
    }

    fn next_answer(&mut self) -> Option<ProcessingResponse> {
        if let Some(answer) = self.answers.pop_front() {
            return Some(answer);
        }
        let unsent = self.unsent.as_mut()?;
        if !unsent.rest.is_empty() || !unsent.is_begun {
            let chunk = unsent.rest.split_to(unsent.rest.len().min(MAX_CHUNK));
            unsent.is_begun = true;
            let ends = unsent.rest.is_empty() && !unsent.parts.trailers;
            return Some(messages::request_chunk(&chunk, ends));
        }
        let trailers = unsent.parts.trailers;
        self.unsent = None;
        trailers.then(messages::pass_request_trailers)
    }

    async fn next_event(&mut self) -> SessionEvent {
        let Self { pick, body, pending, inbound, force_close, .. } = self;
        let may_read = pending.is_none();
        tokio::select! {
            biased;
            Some(picked) = OptionFuture::from(pick.as_mut()) => {
                *pick = None;
                SessionEvent::Picked(picked)
            }
            Some(permit) = OptionFuture::from(body.as_ref().filter(|_| !may_read).map(mpsc::Sender::reserve)) => {
                let is_rejected = permit.map(|permit| pending.take().map(|chunk| permit.send(chunk))).is_err();
                if is_rejected { SessionEvent::BodyRejected } else { SessionEvent::ChunkTaken }
            }
            message = inbound.message(), if may_read => SessionEvent::Message(message.map(|message| message.map(Box::new))),
            () = force_close.cancelled(), if pick.is_none() => SessionEvent::ForceClosed,
        }
    }

    fn receive(&mut self, message: ProcessingRequest) -> Result<(), Status> {
        let ProcessingRequest { metadata_context, protocol_config, request, .. } = message;
        if std::mem::replace(&mut self.is_first, false)
            && let Some(config) = protocol_config
        {
            self.response_mode = ResponseBodyMode::of(config.response_body_mode);
            if !messages::is_full_duplex(config.request_body_mode) {
                return Err(Status::failed_precondition(
                    "the endpoint picker protocol needs request_body_mode: FULL_DUPLEX_STREAMED in the ext_proc filter",
                ));
            }
        }
        // Such as a message for flow control.
        let Some(part) = request else { return Ok(()) };
        let step = self.exchange.receive(messages::kind(&part));
        let step = step.map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.take_step(step, part, metadata_context.as_ref());
        Ok(())
    }

    fn take_step(&mut self, step: ExchangeStep, part: Part, metadata: Option<&Metadata>) {
        match (step, part) {
            (ExchangeStep::BeginRequest { ends }, Part::RequestHeaders(headers)) => {
                self.begin_request(headers.headers, ends, messages::allowed_endpoints(metadata));
            }
            (ExchangeStep::AddToBody { ends }, Part::RequestBody(chunk)) => {
                self.ends_body = ends;
                if self.body.is_some() && !chunk.body.is_empty() {
                    self.pending = Some(Bytes::from(chunk.body));
                } else if ends {
                    self.body = None;
                }
            }
            (ExchangeStep::EndBody, _) => self.body = None,
            (ExchangeStep::Abandon, _) => {
                (self.pick, self.body, self.pending) = (None, None, None);
                self.answers.push_back(messages::pass_response_headers());
            }
            (ExchangeStep::BeginResponse { ends }, Part::ResponseHeaders(headers)) => {
                let (status, headers) = messages::response_head(headers.headers);
                if let Some(observed) = &mut self.observed {
                    observed.start(status, &headers, messages::served_endpoint(metadata));
                }
                self.complete_if(ends);
                self.answers.push_back(messages::pass_response_headers());
            }
            (ExchangeStep::PassBody { ends }, Part::ResponseBody(chunk)) => {
                let chunk = Bytes::from(chunk.body);
                self.answers.push_back(messages::pass_response_chunk(&chunk, ends, self.response_mode));
                if let Some(observed) = &mut self.observed {
                    observed.push(chunk);
                }
                self.complete_if(ends);
            }
            (ExchangeStep::EndResponse, _) => {
                self.complete_if(true);
                self.answers.push_back(messages::pass_response_trailers());
            }
            (ExchangeStep::PassUnobserved, Part::ResponseBody(chunk)) => {
                let (body, ends) = (Bytes::from(chunk.body), chunk.end_of_stream);
                self.answers.push_back(messages::pass_response_chunk(&body, ends, self.response_mode));
            }
            (ExchangeStep::PassUnobserved, _) => self.answers.push_back(messages::pass_response_trailers()),
            // Other steps do not follow from these messages.
            _ => {}
        }
    }

    fn begin_request(&mut self, headers: Option<EnvoyHeaders>, ends: bool, allowed: Option<Vec<String>>) {
        let (sender, body) = RequestBody::channel();
        self.body = (!ends).then_some(sender);
        let picker = self.picker.clone();
        let pick = match messages::request_head(headers) {
            Ok(head) => {
                async move { own_response(picker.pick(head.map(|()| body), allowed).await).await }.boxed()
            }
            Err(error) => {
                let error = ApiError::new(ApiErrorCode::InvalidRequest, error.to_string());
                own_response(PickOutcome::Respond(error.response(ErrorFormat::OpenAi))).boxed()
            }
        };
        self.pick = Some(pick);
    }

    fn complete_if(&mut self, ends: bool) {
        if ends && let Some(observed) = self.observed.take() {
            observed.complete();
        }
    }

    fn picked(&mut self, picked: Picked) {
        (self.body, self.pending) = (None, None);
        match picked {
            Picked::Response(response) => {
                if self.exchange.respond() {
                    self.answers.push_back(*response);
                }
            }
            Picked::Route(picked) => {
                // Dropped, it leaves its engines.
                let Some(parts) = self.exchange.route() else { return };
                let endpoints = picked.endpoints(self.fallbacks);
                let length = parts.body.then_some(picked.body().len());
                self.answers.push_back(messages::route(&endpoints, &picked.header_changes(), length));
                if parts.body {
                    self.unsent = Some(UnsentBody { rest: picked.body().clone(), parts, is_begun: false });
                }
                self.observed = Some(picked.sent());
            }
        }
    }
}

/// The message for the response of a path that the picker serves itself, or for an error.
async fn own_response(outcome: PickOutcome) -> Picked {
    let response = match outcome {
        PickOutcome::Picked(picked) => return Picked::Route(picked),
        PickOutcome::Respond(response) => response,
    };
    let (head, body) = response.into_parts();
    let message = match Limited::new(body, MAX_OWN_RESPONSE).collect().await {
        Ok(body) => messages::respond(head.status, &head.headers, &body.to_bytes()),
        Err(_) => {
            let text = "this response is too large for an endpoint picker; request it from a gateway";
            let error = ApiError::new(ApiErrorCode::UnsupportedByFleet, text).response(ErrorFormat::OpenAi);
            let (head, body) = error.into_parts();
            let body = body.collect().await.map(Collected::to_bytes).unwrap_or_default();
            messages::respond(head.status, &head.headers, &body)
        }
    };
    Picked::Response(Box::new(message))
}
