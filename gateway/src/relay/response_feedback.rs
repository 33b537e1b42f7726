//! What a response shows about its request: the first token, its end, and its token counts. The same for a response that the gateway
//! relays and for one that it only observes.

use crate::decide::InFlightGuard;
use crate::feedback::RequestRecorder;
use crate::response::{ResponseEvents, ResponseSummary, TokenUsage};

/// Feedback of one response. Dropped before the response is complete, it releases the engines and counts the request as abandoned.
#[derive(Debug)]
pub(crate) struct ResponseFeedback {
    /// `None` if the response is no event stream.
    pub(crate) events: Option<ResponseEvents>,
    pub(crate) in_flight: InFlightGuard,
    /// `None` for one sample of a merged response.
    pub(crate) recorder: Option<RequestRecorder>,
}

impl ResponseFeedback {
    /// A chunk of the response goes to the client.
    pub(crate) fn record_chunk(&mut self) {
        match (&mut self.recorder, &self.events) {
            (Some(recorder), Some(_)) => recorder.record_chunk(),
            (Some(recorder), None) => recorder.set_sample_of_batch(),
            (None, _) => {}
        }
    }

    /// A response that arrived in chunks is complete, with the token counts of its prefill.
    pub(crate) fn record_stream_complete(&mut self, prefill_usage: Option<TokenUsage>) {
        let events = self.events.as_ref();
        let mut summary =
            events.map(|events| ResponseSummary::read(events.last_payload())).unwrap_or_default();
        let previous =
            events.map(|events| ResponseSummary::read(events.previous_payload())).unwrap_or_default();
        let first = events.map(|events| ResponseSummary::read(events.first_payload())).unwrap_or_default();
        // In Anthropic's API the counts are in the event before the last, and those of the input perhaps only in the first.
        summary.usage = summary
            .usage
            .or(previous.usage)
            .map(|usage| usage.with_input_of(first.usage.unwrap_or_default()));
        // Without usage: engines send an event per token, unless configured otherwise.
        let tokens = summary.usage.map(|usage| usage.completion_tokens).filter(|tokens| *tokens > 0);
        self.in_flight.record_response_complete(tokens.or(events.map(ResponseEvents::events)).unwrap_or(0));
        if let Some(recorder) = &mut self.recorder {
            let last = events.map(ResponseEvents::last_payload).unwrap_or_default();
            recorder.completed(summary.usage, prefill_usage, last, |finish| {
                finish.add(&first);
                finish.add(&previous);
                finish.add(&summary);
            });
        }
    }

    /// A response that was awaited as a whole is complete, with its token counts and those of its prefill.
    pub(crate) fn record_body_complete(
        &mut self,
        body: &[u8],
        usage: Option<TokenUsage>,
        prefill_usage: Option<TokenUsage>,
    ) {
        self.in_flight.record_response_complete(usage.map_or(0, |usage| usage.completion_tokens));
        if let Some(recorder) = &mut self.recorder {
            recorder.set_sample_of_batch();
            recorder.completed(usage, prefill_usage, body, |finish| {
                finish.add(&ResponseSummary::read(body));
            });
        }
    }
}
