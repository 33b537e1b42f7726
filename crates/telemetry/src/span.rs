//! One span of a trace.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{
    Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt as _, TraceFlags, Tracer as _,
};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, Span};

/// <https://www.w3.org/TR/trace-context/>
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// A span that ends when it is dropped. It may be stored, in a response body for instance, and sent to
/// another thread.
///
/// Where tracing is off it is empty, and every call returns at once.
#[must_use = "a span that is dropped has ended"]
pub struct SpanHandle {
    state: State,
}

enum State {
    /// Tracing is off.
    Off,
    /// The sampler said no: there is an identity to hand on, and nothing to record.
    Unsampled(SpanContext),
    Recorded(Box<Recorded>),
}

struct Recorded {
    span: Span,
    tracer: Arc<SdkTracer>,
}

impl SpanHandle {
    /// A handle that does nothing.
    pub const fn off() -> Self {
        Self { state: State::Off }
    }

    /// A span of kind server, whose parent is the caller named in `headers`, if it is.
    pub(crate) fn server(
        tracer: &Arc<SdkTracer>,
        name: Cow<'static, str>,
        headers: &HeaderMap,
        start: Option<SystemTime>,
    ) -> Self {
        let parent =
            TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
        Self::start(tracer, name, SpanKind::Server, &parent, start)
    }

    fn start(
        tracer: &Arc<SdkTracer>,
        name: Cow<'static, str>,
        kind: SpanKind,
        parent: &Context,
        start: Option<SystemTime>,
    ) -> Self {
        let mut builder = SpanBuilder::from_name(name).with_kind(kind);
        if let Some(start) = start {
            builder = builder.with_start_time(start);
        }
        let span = tracer.build_with_context(builder, parent);
        let state = if span.is_recording() {
            State::Recorded(Box::new(Recorded { span, tracer: Arc::clone(tracer) }))
        } else {
            State::Unsampled(span.span_context().clone())
        };
        Self { state }
    }

    /// Starts a span below this one.
    pub fn child(&self, name: impl Into<Cow<'static, str>>, kind: SpanKind) -> Self {
        self.start_child(name, kind, None)
    }

    /// [`SpanHandle::child`] for something that began at `start`.
    pub fn child_at(&self, name: impl Into<Cow<'static, str>>, kind: SpanKind, start: SystemTime) -> Self {
        self.start_child(name, kind, Some(start))
    }

    fn start_child(
        &self,
        name: impl Into<Cow<'static, str>>,
        kind: SpanKind,
        start: Option<SystemTime>,
    ) -> Self {
        match &self.state {
            State::Off => Self::off(),
            // A child of what is not recorded is not recorded either; the parent's identity serves for both.
            State::Unsampled(context) => Self { state: State::Unsampled(context.clone()) },
            State::Recorded(recorded) => {
                let parent = Context::new().with_remote_span_context(recorded.span.span_context().clone());
                Self::start(&recorded.tracer, name.into(), kind, &parent, start)
            }
        }
    }

    /// Whether what is set here will be exported. Worth asking before computing an expensive value.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        matches!(self.state, State::Recorded(_))
    }

    /// Trace id as 32 hexadecimal digits, to be named in logs.
    #[must_use]
    pub fn trace_id(&self) -> Option<String> {
        self.context().map(|context| context.trace_id().to_string())
    }

    /// Sets an attribute; [`crate::names`] has the standard ones. Set each once: the last does not replace.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let State::Recorded(recorded) = &mut self.state {
            recorded.span.set_attribute(KeyValue::new(key, value));
        }
    }

    /// Gives the span another name, when more is known than at its start.
    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        if let State::Recorded(recorded) = &mut self.state {
            recorded.span.update_name(name);
        }
    }

    /// Notes that something happened now.
    pub fn event(&mut self, name: impl Into<Cow<'static, str>>) {
        if let State::Recorded(recorded) = &mut self.state {
            recorded.span.add_event(name, Vec::new());
        }
    }

    /// Marks the span as failed.
    pub fn error(&mut self, message: impl Into<Cow<'static, str>>) {
        if let State::Recorded(recorded) = &mut self.state {
            recorded.span.set_status(Status::error(message));
        }
    }

    /// Makes this span the parent of whoever gets `headers`: replaces `traceparent` and `tracestate`.
    ///
    /// Where tracing is off, the headers stay, so that those of the client pass through.
    pub fn inject(&self, headers: &mut HeaderMap) {
        let Some(context) = self.context() else { return };
        let parent = format!(
            "00-{}-{}-{:02x}",
            context.trace_id(),
            context.span_id(),
            context.trace_flags() & TraceFlags::SAMPLED
        );
        let Ok(parent) = HeaderValue::try_from(parent) else { return };
        headers.insert(TRACEPARENT, parent);
        match HeaderValue::try_from(context.trace_state().header()) {
            Ok(state) if !state.is_empty() => {
                headers.insert(TRACESTATE, state);
            }
            _ => {
                headers.remove(TRACESTATE);
            }
        }
    }

    /// Ends the span now.
    pub fn end(self) {}

    /// Ends the span with another time than now.
    pub fn end_at(self, end: SystemTime) {
        if let State::Recorded(mut recorded) = self.state {
            recorded.span.end_with_timestamp(end);
        }
    }

    fn context(&self) -> Option<&SpanContext> {
        match &self.state {
            State::Off => None,
            State::Unsampled(context) => Some(context),
            State::Recorded(recorded) => Some(recorded.span.span_context()),
        }
        // Invalid after the exporter has been shut down.
        .filter(|context| context.is_valid())
    }
}

impl fmt::Debug for SpanHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanHandle")
            .field("trace_id", &self.trace_id())
            .field("recording", &self.is_recording())
            .finish()
    }
}
