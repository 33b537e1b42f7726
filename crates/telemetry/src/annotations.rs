//! What is written on spans while they are open.

use std::borrow::Cow;

use tokio::time::Instant;

/// What an attribute says.
#[derive(Debug, Clone, PartialEq)]
pub enum AttributeValue<'a> {
    /// A text, of which the first kilobyte is exported.
    Text(Cow<'a, str>),
    /// Whether something is so.
    Bool(bool),
    /// A count.
    Integer(i64),
    /// A measure.
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

/// Counts beyond the largest that can be told are told as that.
impl From<u64> for AttributeValue<'_> {
    fn from(count: u64) -> Self {
        Self::Integer(i64::try_from(count).unwrap_or(i64::MAX))
    }
}

/// As of `u64`.
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

/// One thing that is written on a span.
#[derive(Debug)]
pub(crate) enum SpanAnnotation {
    Attribute(&'static str, AttributeValue<'static>),
    /// Something happened within it.
    Event(&'static str, Instant),
    /// The span has failed.
    Error(Cow<'static, str>),
}
