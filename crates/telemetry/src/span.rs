//! One span of a trace.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use http::header::HeaderMap;
use opentelemetry::trace::{Event, Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId};
use opentelemetry::{Array, KeyValue, StringValue, Value};

use crate::context;
use crate::trace::Trace;

mod spare;

pub(crate) use spare::give_back;

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
    Recorded(Arc<Trace>, Box<Record>),
}

/// What is known of a span.
pub(crate) struct Record {
    pub(crate) id: SpanId,
    pub(crate) parent: SpanId,
    /// Whether it has no parent in this process.
    pub(crate) is_root: bool,
    pub(crate) kind: SpanKind,
    pub(crate) name: Cow<'static, str>,
    pub(crate) start: SystemTime,
    pub(crate) end: SystemTime,
    pub(crate) links: Vec<Link>,
    pub(crate) status: Status,
    pub(crate) notes: Notes,
    /// Tells the rest once the span is exported.
    pub(crate) later: Option<Later>,
}

/// Spans that have ended; boxed, because they go through three hands without being copied.
pub(crate) type Spans = Vec<Box<Record>>;

type Later = Box<dyn FnOnce(&mut Notes) + Send + Sync>;

/// What is written on a span.
#[derive(Debug, Default)]
pub struct Notes {
    pub(crate) attributes: Vec<KeyValue>,
    pub(crate) events: Vec<Event>,
}

impl Notes {
    /// Sets an attribute; [`crate::names`] has the standard ones. Set each once: the last does not replace.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.attributes.push(KeyValue::new(key, value));
    }

    /// Notes that something happened at `time`.
    pub fn event(&mut self, name: &'static str, time: SystemTime, attributes: Vec<KeyValue>) {
        self.events.push(Event::new(name, time, attributes, 0));
    }
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
        let mut record = Record::new(parent, name, kind, start);
        record.is_root = true;
        Self { state: State::Recorded(trace, record) }
    }

    /// Starts a span below this one.
    pub fn child(&self, name: impl Into<Cow<'static, str>>, kind: SpanKind) -> Self {
        self.child_at(name, kind, SystemTime::now())
    }

    /// [`SpanHandle::child`] for something that began at `start`.
    pub fn child_at(&self, name: impl Into<Cow<'static, str>>, kind: SpanKind, start: SystemTime) -> Self {
        let state = match &self.state {
            State::Off => State::Off,
            // A child of what is not recorded is not recorded either; the parent's identity serves for both.
            State::Unrecorded(context) => State::Unrecorded(context.clone()),
            State::Recorded(trace, parent) => {
                State::Recorded(trace.clone(), Record::new(parent.id, name.into(), kind, start))
            }
        };
        Self { state }
    }

    /// Whether what is set here may be exported. Worth asking before computing an expensive value.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        matches!(self.state, State::Recorded(..))
    }

    /// When the span began; now, if it is not recorded.
    #[must_use]
    pub fn start(&self) -> SystemTime {
        match &self.state {
            State::Recorded(_, record) => record.start,
            State::Off | State::Unrecorded(_) => SystemTime::now(),
        }
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

    /// [`SpanHandle::trace_id`], if the collector will get this trace for sure: what metrics may point to.
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
        if let State::Recorded(trace, record) = &mut self.state {
            record.notes.set(crate::names::KEPT, why);
            trace.keep();
        }
    }

    /// Sets an attribute, see [`Notes::set`].
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let State::Recorded(_, record) = &mut self.state {
            record.notes.set(key, value);
        }
    }

    /// Has attributes and events written: at once if the span is exported for sure, so that nothing waits with it; else only if it is
    /// exported in the end.
    pub fn set_cheaply(&mut self, tell: impl FnOnce(&mut Notes) + Send + Sync + 'static) {
        match &mut self.state {
            State::Recorded(trace, record) if trace.is_exported() => tell(&mut record.notes),
            _ => self.set_later(tell),
        }
    }

    /// Has attributes and events written only if the span is exported.
    pub fn set_later(&mut self, tell: impl FnOnce(&mut Notes) + Send + Sync + 'static) {
        if let State::Recorded(_, record) = &mut self.state {
            record.later = Some(match record.later.take() {
                None => Box::new(tell),
                Some(before) => Box::new(|notes| {
                    before(notes);
                    tell(notes);
                }),
            });
        }
    }

    /// Gives the span another name, when more is known than at its start.
    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        if let State::Recorded(_, record) = &mut self.state {
            record.name = name.into();
        }
    }

    /// Notes that something happened now.
    pub fn event(&mut self, name: &'static str, attributes: Vec<KeyValue>) {
        if let State::Recorded(_, record) = &mut self.state {
            record.notes.event(name, SystemTime::now(), attributes);
        }
    }

    /// Says that this span is there because of another one.
    pub fn link(&mut self, to: SpanContext) {
        if let State::Recorded(_, record) = &mut self.state {
            record.links.push(Link::with_context(to));
        }
    }

    /// Marks the span as failed.
    pub fn error(&mut self, message: impl Into<Cow<'static, str>>) {
        if let State::Recorded(_, record) = &mut self.state {
            record.status = Status::error(message);
        }
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

impl Record {
    fn new(parent: SpanId, name: Cow<'static, str>, kind: SpanKind, start: SystemTime) -> Box<Self> {
        let mut record = spare::take().unwrap_or_default();
        record.id = SpanId::from(fastrand::u64(1..));
        record.parent = parent;
        record.kind = kind;
        record.name = name;
        record.start = start;
        record.end = start;
        record
    }

    /// Makes it as good as new, but for the memory that it has.
    fn clear(&mut self) {
        let Self { links, notes: Notes { mut attributes, mut events }, .. } = std::mem::take(self);
        attributes.clear();
        events.clear();
        *self = Self { links, notes: Notes { attributes, events }, ..Self::default() };
        self.links.clear();
    }
}

impl Default for Record {
    fn default() -> Self {
        Self {
            id: SpanId::INVALID,
            parent: SpanId::INVALID,
            is_root: false,
            kind: SpanKind::Internal,
            name: Cow::Borrowed(""),
            start: SystemTime::UNIX_EPOCH,
            end: SystemTime::UNIX_EPOCH,
            links: Vec::new(),
            status: Status::Unset,
            notes: Notes::default(),
            later: None,
        }
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
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

/// Several texts as one attribute.
#[must_use]
pub fn texts(texts: Vec<String>) -> Value {
    Value::Array(Array::String(texts.into_iter().map(StringValue::from).collect()))
}
