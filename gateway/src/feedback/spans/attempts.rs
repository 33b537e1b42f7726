//! Attempts of a request, in its trace.

use moongate_telemetry::{AttributeWriter, SpanContext, attribute_names};

use super::RequestSpan;

/// One attempt: a decision, and the legs that follow from it.
pub(crate) struct AttemptTrace<'a> {
    pub(crate) span: &'a RequestSpan,
    /// Counted from 1.
    pub(crate) number: u32,
    /// The leg whose failure caused this attempt.
    pub(crate) failed_leg: Option<SpanContext>,
}

impl AttemptTrace<'_> {
    pub(super) fn retry_cause(&self) -> Option<Box<RetryCause>> {
        (self.number > 1).then(|| {
            Box::new(RetryCause { previous_attempts: self.number - 1, failed_leg: self.failed_leg.clone() })
        })
    }
}

/// Why an attempt after the first was made.
#[derive(Debug)]
pub(super) struct RetryCause {
    previous_attempts: u32,
    failed_leg: Option<SpanContext>,
}

impl RetryCause {
    pub(super) fn write_attributes(&self, attributes: &mut AttributeWriter<'_>) {
        attributes.set(attribute_names::HTTP_REQUEST_RESEND_COUNT, self.previous_attempts);
        if let Some(failed) = &self.failed_leg {
            attributes.link(failed);
        }
    }
}
