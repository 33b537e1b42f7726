//! Attributes, events and errors recorded on open spans.

use std::borrow::Cow;

use tokio::time::Instant;

/// Value of a span attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum AttributeValue<'a> {
    /// Text, exported up to its first kilobyte.
    Text(Cow<'a, str>),
    Bool(bool),
    /// A count or another integer.
    Integer(i64),
    /// A measurement, such as seconds.
    Float(f64),
}

impl<'a> From<&'a str> for AttributeValue<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(Cow::Borrowed(text))
    }
}

impl From<String> for AttributeValue<'_> {
    fn from(text: String) -> Self {
        Self::Text(Cow::Owned(text))
    }
}

impl<'a> From<&'a String> for AttributeValue<'a> {
    fn from(text: &'a String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<bool> for AttributeValue<'_> {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<u16> for AttributeValue<'_> {
    fn from(count: u16) -> Self {
        Self::Integer(count.into())
    }
}

impl From<u32> for AttributeValue<'_> {
    fn from(count: u32) -> Self {
        Self::Integer(count.into())
    }
}

/// Counts above `i64::MAX` are exported as `i64::MAX`.
impl From<u64> for AttributeValue<'_> {
    fn from(count: u64) -> Self {
        Self::Integer(i64::try_from(count).unwrap_or(i64::MAX))
    }
}

/// Counts above `i64::MAX` are exported as `i64::MAX`.
impl From<usize> for AttributeValue<'_> {
    fn from(count: usize) -> Self {
        Self::from(count as u64)
    }
}

impl From<f64> for AttributeValue<'_> {
    fn from(measure: f64) -> Self {
        Self::Float(measure)
    }
}

/// One annotation of an open span.
#[derive(Debug)]
pub(crate) enum SpanAnnotation {
    Attribute(&'static str, AttributeValue<'static>),
    /// A named event at a point in time.
    Event(&'static str, Instant),
    /// The span failed with this message.
    Error(Cow<'static, str>),
}
