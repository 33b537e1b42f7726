//! The tries to answer a request.

use moongate_telemetry::{AttributeWriter, SpanContext, attribute_names};

use super::RequestSpan;

/// One try to answer a request: a decision, and the legs that follow from it.
pub(crate) struct AttemptTrace<'a> {
    pub(crate) span: &'a RequestSpan,
    /// From 1.
    pub(crate) number: u32,
    /// The leg whose failure this try is there for.
    pub(crate) failed_leg: Option<SpanContext>,
}

impl AttemptTrace<'_> {
    pub(super) fn retry_cause(&self) -> Option<Box<RetryCause>> {
        (self.number > 1).then(|| {
            Box::new(RetryCause { previous_attempts: self.number - 1, failed_leg: self.failed_leg.clone() })
        })
    }
}

/// What a try is there for that is not the first.
#[derive(Debug)]
pub(super) struct RetryCause {
    /// Tries before it.
    previous_attempts: u32,
    failed_leg: Option<SpanContext>,
}

impl RetryCause {
    pub(super) fn write_attributes(&self, notes: &mut AttributeWriter<'_>) {
        notes.set(attribute_names::HTTP_REQUEST_RESEND_COUNT, self.previous_attempts);
        if let Some(failed) = &self.failed_leg {
            notes.link(failed);
        }
    }
}
