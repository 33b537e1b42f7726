//! The tries to answer a request.

use moongate_telemetry::{Notes, SpanContext, names};

use super::RequestSpan;

/// One try to answer a request: a decision, and the legs that follow from it.
pub(crate) struct Try<'a> {
    pub(crate) span: &'a RequestSpan,
    /// From 1.
    pub(crate) number: u32,
    /// The leg whose failure this try is there for.
    pub(crate) after: Option<SpanContext>,
}

impl Try<'_> {
    pub(super) fn again(&self) -> Option<Box<Again>> {
        (self.number > 1).then(|| Box::new(Again { tries: self.number - 1, after: self.after.clone() }))
    }
}

/// What a try is there for that is not the first.
#[derive(Debug)]
pub(super) struct Again {
    /// Tries before it.
    tries: u32,
    after: Option<SpanContext>,
}

impl Again {
    pub(super) fn tell(&self, notes: &mut Notes<'_>) {
        notes.set(names::HTTP_REQUEST_RESEND_COUNT, self.tries);
        if let Some(failed) = &self.after {
            notes.link(failed);
        }
    }
}
