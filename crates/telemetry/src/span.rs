//! One span of a trace.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::header::HeaderMap;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, TraceFlags, TraceId};
use tokio::time::Instant;

use crate::context;
use crate::notes::{Note, Value};
use crate::tell::Tell;
use crate::trace::{Record, Trace};

/// Most that is written on a span, as of OpenTelemetry's own.
const MAX_NOTES: usize = 128;

/// A span that ends when it is dropped. It may be stored, in a response body for instance, and sent to
/// another thread.
///
/// Where tracing is off it is empty, and every call returns at once. Otherwise it holds facts, which are told if the span is exported.
#[must_use = "a span that is dropped has ended"]
pub struct SpanHandle<T: Tell + 'static = ()> {
    /// `None` where tracing is off.
    open: Option<(Arc<Trace>, Box<Record<T>>)>,
}

impl<T: Tell> SpanHandle<T> {
    /// A handle that does nothing.
    pub const fn off() -> Self {
        Self { open: None }
    }

    /// Starts a span: the first of its trace in this process, below the parent if that is valid, or one below another.
    pub(crate) fn open(
        trace: Arc<Trace>,
        (parent, is_root): (SpanId, bool),
        (name, kind, start): (Cow<'static, str>, SpanKind, Instant),
        facts: T,
    ) -> Self {
        let id = SpanId::from(fastrand::u64(1..));
        let record = Record { id, parent, is_root, kind, name, start, end: None, notes: Vec::new(), facts };
        Self { open: Some((trace, Box::new(record))) }
    }

    /// Starts a span below this one.
    pub fn child(&self, name: &'static str, kind: SpanKind) -> SpanHandle {
        match &self.open {
            None => SpanHandle::off(),
            Some(_) => self.child_at(name, kind, Instant::now(), || ()),
        }
    }

    /// Starts a span below this one of something that began at `start`.
    pub fn child_at<U: Tell>(
        &self,
        name: &'static str,
        kind: SpanKind,
        start: Instant,
        facts: impl FnOnce() -> U,
    ) -> SpanHandle<U> {
        match &self.open {
            None => SpanHandle::off(),
            Some((trace, record)) => {
                let what = (Cow::Borrowed(name), kind, start);
                SpanHandle::open(trace.clone(), (record.id, false), what, facts())
            }
        }
    }

    /// What is known of it, unless tracing is off.
    pub fn facts(&self) -> Option<&T> {
        self.open.as_ref().map(|(_, record)| &record.facts)
    }

    /// Adds to what is known of it, unless tracing is off.
    pub fn know(&mut self, know: impl FnOnce(&mut T)) {
        if let Some(facts) = self.facts_mut() {
            know(facts);
        }
    }

    /// What is known of it, unless tracing is off.
    pub fn facts_mut(&mut self) -> Option<&mut T> {
        self.open.as_mut().map(|(_, record)| &mut record.facts)
    }

    /// Whether what is set here may be exported. Worth asking before computing an expensive value.
    #[must_use]
    pub const fn is_recording(&self) -> bool {
        self.open.is_some()
    }

    /// Identity of the trace, to be named in logs.
    #[must_use]
    pub fn trace_id(&self) -> Option<TraceId> {
        self.open.as_ref().map(|(trace, _)| trace.id)
    }

    /// [`SpanHandle::trace_id`], if the collector will get this trace for sure: what metrics may point to, and what is worth telling at once.
    #[must_use]
    pub fn exported_trace_id(&self) -> Option<TraceId> {
        self.open.as_ref().filter(|(trace, _)| trace.is_exported()).map(|(trace, _)| trace.id)
    }

    /// Identity of the span, for links to it.
    #[must_use]
    pub fn context(&self) -> Option<SpanContext> {
        let (trace, record) = self.open.as_ref()?;
        let flags = if trace.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
        Some(SpanContext::new(trace.id, record.id, flags, false, trace.state.clone()))
    }

    /// Has the whole trace exported, whatever the sampler said, and notes why. That is done for so many traces in a second only.
    pub fn keep(&mut self, why: &'static str) {
        self.set(crate::names::KEPT, why);
        if let Some((trace, _)) = &self.open {
            trace.keep();
        }
    }

    fn note(&mut self, note: impl FnOnce() -> Note) {
        if let Some((_, record)) = &mut self.open
            && record.notes.len() < MAX_NOTES
        {
            record.notes.push(note());
        }
    }

    /// Sets an attribute; [`crate::names`] has the standard ones. Set each once: the last does not replace.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value<'static>>) {
        self.note(|| Note::Attribute(key, value.into()));
    }

    /// Gives the span another name, when more is known than at its start.
    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        if let Some((_, record)) = &mut self.open {
            record.name = name.into();
        }
    }

    /// Notes that something happened now.
    pub fn event(&mut self, name: &'static str) {
        self.note(|| Note::Event(name, Instant::now()));
    }

    /// Marks the span as failed.
    pub fn error(&mut self, message: impl Into<Cow<'static, str>>) {
        self.note(|| Note::Error(message.into()));
    }

    /// Whether the sampler took its trace, which everybody who is called is told.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.open.as_ref().is_some_and(|(trace, _)| trace.sampled)
    }

    /// Makes this span the parent of whoever gets `headers`: replaces `traceparent` and `tracestate`.
    ///
    /// Where tracing is off, the headers stay, so that those of the client pass through.
    pub fn inject(&self, headers: &mut HeaderMap) {
        if let Some((trace, record)) = &self.open {
            context::inject(headers, (trace.id, record.id), trace.sampled, &trace.state);
        }
    }

    /// Says when the span ends, which is otherwise when it is dropped.
    pub fn ends_at(&mut self, end: Instant) {
        if let Some((_, record)) = &mut self.open {
            record.end = Some(end.max(record.start));
        }
    }

    /// Ends the span now.
    pub fn end(self) {}
}

impl<T: Tell> Drop for SpanHandle<T> {
    fn drop(&mut self) {
        if let Some((trace, mut record)) = self.open.take() {
            record.end.get_or_insert_with(Instant::now);
            trace.ended(record);
        }
    }
}

impl<T: Tell> fmt::Debug for SpanHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanHandle")
            .field("trace_id", &self.trace_id())
            .field("recording", &self.is_recording())
            .finish()
    }
}
