//! One span of a trace.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use http::header::HeaderMap;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, TraceFlags, TraceId};
use opentelemetry::{KeyValue, Value};

use crate::context;
use crate::notes::{Event, Note, Tell};
use crate::trace::{Record, Trace};

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
    /// Not sampled, and no room to hold it: there is an identity to hand on, and nothing to record.
    Unrecorded(Box<SpanContext>),
    Recorded(Arc<Trace>, Record),
}

impl SpanHandle {
    /// A handle that does nothing.
    pub const fn off() -> Self {
        Self { state: State::Off }
    }

    /// A handle that only hands an identity on.
    pub(crate) fn unrecorded(context: SpanContext) -> Self {
        Self { state: State::Unrecorded(Box::new(context)) }
    }

    /// The first span of a trace in this process, below the parent if that is valid.
    pub(crate) fn root(
        trace: Arc<Trace>,
        (parent, name, kind, start): (SpanId, Cow<'static, str>, SpanKind, SystemTime),
    ) -> Self {
        let record = Record { id: new_id(), parent, is_root: true, kind, name, start, end: start };
        Self { state: State::Recorded(trace, record) }
    }

    /// Starts a span below this one.
    pub fn child(&self, name: &'static str, kind: SpanKind) -> Self {
        match self.state {
            State::Off => Self::off(),
            _ => self.child_at(name, kind, SystemTime::now()),
        }
    }

    /// [`SpanHandle::child`] for something that began at `start`.
    pub fn child_at(&self, name: &'static str, kind: SpanKind, start: SystemTime) -> Self {
        match &self.state {
            State::Off => Self::off(),
            // A child of what is not recorded is not recorded either; the parent's identity serves for both.
            State::Unrecorded(context) => Self { state: State::Unrecorded(context.clone()) },
            State::Recorded(trace, parent) => {
                let (parent, name) = (parent.id, Cow::Borrowed(name));
                let record = Record { id: new_id(), parent, is_root: false, kind, name, start, end: start };
                Self { state: State::Recorded(trace.clone(), record) }
            }
        }
    }

    /// [`SpanHandle::child`] for something that began with this one.
    pub fn first_child(&self, name: &'static str, kind: SpanKind) -> Self {
        match &self.state {
            State::Recorded(_, record) => self.child_at(name, kind, record.start),
            _ => self.child_at(name, kind, SystemTime::UNIX_EPOCH),
        }
    }

    /// Whether what is set here may be exported. Worth asking before computing an expensive value.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        matches!(self.state, State::Recorded(..))
    }

    /// Identity of the trace, to be named in logs.
    #[must_use]
    pub fn trace_id(&self) -> Option<TraceId> {
        match &self.state {
            State::Off => None,
            State::Unrecorded(context) => Some(context.trace_id()),
            State::Recorded(trace, _) => Some(trace.id),
        }
    }

    /// [`SpanHandle::trace_id`], if the collector will get this trace for sure: what metrics may point to, and what is worth telling at once.
    #[must_use]
    pub fn exported_trace_id(&self) -> Option<TraceId> {
        match &self.state {
            State::Recorded(trace, _) if trace.is_exported() => Some(trace.id),
            _ => None,
        }
    }

    /// Identity of the span, for links to it. `None` if it is not recorded.
    #[must_use]
    pub fn context(&self) -> Option<SpanContext> {
        match &self.state {
            State::Recorded(trace, record) => {
                let flags = if trace.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
                Some(SpanContext::new(trace.id, record.id, flags, false, trace.state.clone()))
            }
            State::Off | State::Unrecorded(_) => None,
        }
    }

    /// Has the whole trace exported, whatever the sampler said, and notes why. That is done for so many traces in a second only.
    pub fn keep(&mut self, why: &'static str) {
        if let State::Recorded(trace, record) = &self.state {
            trace.note(record.id, Note::Attribute(crate::names::KEPT, why.into()));
            trace.keep();
        }
    }

    fn note(&self, note: impl FnOnce() -> Note) {
        if let State::Recorded(trace, record) = &self.state {
            trace.note(record.id, note());
        }
    }

    /// Sets an attribute; [`crate::names`] has the standard ones. Set each once: the last does not replace.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.note(|| Note::Attribute(key, value.into()));
    }

    /// Has attributes and events written only if the span is exported.
    pub fn set_later(&mut self, tell: Arc<dyn Tell>) {
        self.note(|| Note::Later(tell));
    }

    /// Gives the span another name, when more is known than at its start.
    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        if let State::Recorded(_, record) = &mut self.state {
            record.name = name.into();
        }
    }

    /// Notes that something happened now.
    pub fn event(&mut self, name: &'static str, attributes: Vec<KeyValue>) {
        self.note(|| Note::Event(Box::new(Event { name, time: SystemTime::now(), attributes })));
    }

    /// Says that this span is there because of another one.
    pub fn link(&mut self, to: SpanContext) {
        self.note(|| Note::Link(Box::new(to)));
    }

    /// Marks the span as failed.
    pub fn error(&mut self, message: impl Into<Cow<'static, str>>) {
        self.note(|| Note::Error(message.into()));
    }

    /// Makes this span the parent of whoever gets `headers`: replaces `traceparent` and `tracestate`.
    ///
    /// Where tracing is off, the headers stay, so that those of the client pass through.
    pub fn inject(&self, headers: &mut HeaderMap) {
        match &self.state {
            State::Off => {}
            State::Unrecorded(context) => {
                let ids = (context.trace_id(), context.span_id());
                context::inject(headers, ids, context.is_sampled(), context.trace_state());
            }
            State::Recorded(trace, record) => {
                context::inject(headers, (trace.id, record.id), trace.sampled, &trace.state);
            }
        }
    }

    /// Ends the span now.
    pub fn end(self) {}
}

impl Drop for SpanHandle {
    fn drop(&mut self) {
        if let State::Recorded(trace, mut record) = std::mem::replace(&mut self.state, State::Off) {
            // The clock may have been set back meanwhile.
            record.end = SystemTime::now().max(record.start);
            trace.ended(record);
        }
    }
}

fn new_id() -> SpanId {
    SpanId::from(fastrand::u64(1..))
}

impl fmt::Debug for SpanHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanHandle")
            .field("trace_id", &self.trace_id())
            .field("recording", &self.is_recording())
            .finish()
    }
}
