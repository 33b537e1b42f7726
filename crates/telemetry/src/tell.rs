//! What is told of spans once it is known that somebody will see them.

use opentelemetry::trace::{SpanId, SpanKind};
use tokio::time::Instant;

use crate::export::otlp::{Named, Page};
use crate::notes::Value;
use crate::trace::Trace;

/// What is known of a span. It is asked to tell it if the span is exported, and not before: so it costs nine requests in ten nothing but
/// being kept.
pub trait Tell: Send + Sync {
    /// Says what is to be known of the span.
    fn tell(&self, notes: &mut Notes<'_>);

    /// Says which steps it had. Each becomes a span below it.
    fn steps(&self, _steps: &mut Steps<'_>) {}
}

/// Nothing.
impl Tell for () {
    fn tell(&self, _notes: &mut Notes<'_>) {}
}

/// What stands on a span that is being exported.
#[derive(Debug)]
pub struct Notes<'a> {
    pub(crate) page: &'a mut Page,
}

impl Notes<'_> {
    /// Sets an attribute; [`crate::names`] has the standard ones. Set each once: the last does not replace.
    pub fn set<'v>(&mut self, key: &'static str, value: impl Into<Value<'v>>) {
        self.page.attribute(key, &value.into());
    }

    /// Sets an attribute that has several values.
    pub fn list<'v, V: Into<Value<'v>>>(
        &mut self,
        key: &'static str,
        values: impl IntoIterator<Item = V, IntoIter: Clone>,
    ) {
        self.page.list(key, values.into_iter().map(Into::into));
    }

    /// Says that the span is there because of another one.
    pub fn link(&mut self, to: &crate::SpanContext) {
        self.page.link(to);
    }

    /// Says that the span has failed.
    pub fn error(&mut self, message: &str) {
        self.page.error(message);
    }
}

/// The steps of a span that is being exported.
#[derive(Debug)]
pub struct Steps<'a> {
    pub(crate) page: &'a mut Page,
    pub(crate) trace: &'a Trace,
    pub(crate) parent: SpanId,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
}

impl Steps<'_> {
    /// When the span began whose steps they are.
    #[must_use]
    pub const fn start(&self) -> Instant {
        self.start
    }

    /// When it ended.
    #[must_use]
    pub const fn end(&self) -> Instant {
        self.end
    }

    /// A step from `start` to `end`, and what is to be known of it.
    pub fn step(
        &mut self,
        name: &'static str,
        (start, end): (Instant, Instant),
        tell: impl FnOnce(&mut Notes<'_>),
    ) {
        let id = SpanId::from(fastrand::u64(1..));
        let (parent, kind) = (self.parent, &SpanKind::Internal);
        let span = Named { id, parent, is_root: false, name, kind, start, end };
        self.page.span(self.trace, &span, |page| tell(&mut Notes { page }));
    }
}
