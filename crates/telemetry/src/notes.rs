//! What is written on spans.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use opentelemetry::trace::SpanContext;
use opentelemetry::{Array, KeyValue, StringValue, Value};

/// Tells of a span what only matters if it is exported. It is asked then, and not before: so it costs nine requests in ten nothing but being
/// kept.
pub trait Tell: Send + Sync {
    /// Writes it down.
    fn tell(&self, notes: &mut Notes);
}

impl<F: Fn(&mut Notes) + Send + Sync> Tell for F {
    fn tell(&self, notes: &mut Notes) {
        self(notes);
    }
}

/// One thing that is written on a span.
pub(crate) enum Note {
    Attribute(&'static str, Value),
    /// Boxed, as links are: they are rare.
    Event(Box<Event>),
    Link(Box<SpanContext>),
    /// The span has failed.
    Error(Cow<'static, str>),
    Later(Arc<dyn Tell>),
}

/// Something that happened within a span.
pub(crate) struct Event {
    pub(crate) name: &'static str,
    pub(crate) time: SystemTime,
    pub(crate) attributes: Vec<KeyValue>,
}

/// A page to write on.
#[derive(Default)]
pub struct Notes {
    pub(crate) list: Vec<Note>,
}

impl Notes {
    /// Sets an attribute; [`crate::names`] has the standard ones. Set each once: the last does not replace.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.list.push(Note::Attribute(key, value.into()));
    }

    /// Notes that something happened at `time`.
    pub fn event(&mut self, name: &'static str, time: SystemTime, attributes: Vec<KeyValue>) {
        self.list.push(Note::Event(Box::new(Event { name, time, attributes })));
    }
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notes").field("count", &self.list.len()).finish()
    }
}

/// Several texts as one attribute.
#[must_use]
pub fn texts(texts: Vec<String>) -> Value {
    Value::Array(Array::String(texts.into_iter().map(StringValue::from).collect()))
}
