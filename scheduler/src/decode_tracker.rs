//! The sequences that generate on one engine, over time.

use crate::decode_step::DecodeBatch;
use crate::fleet::ReportedLoad;
use crate::seconds::Seconds;

/// The batch of one engine: this gateway's sequences since their first token, and what the latest report has beyond
/// them.
#[derive(Debug, Default)]
pub(crate) struct DecodeTracker {
    own_sequences: u64,
    own_tokens: u64,
    external_sequences: u64,
    external_tokens: u64,
    /// Integral of the batch over time, up to `since`.
    accumulated: DecodeBatch,
    since: Seconds,
}

/// A request that generates.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DecodingRequest {
    sequences: u64,
    /// Tokens that it is expected to occupy.
    tokens: u64,
    started_at: Seconds,
    /// The engine's integral at that time.
    accumulated: DecodeBatch,
}

impl DecodeTracker {
    fn advance(&mut self, now: Seconds) {
        let elapsed = (now - self.since).max(0.0);
        self.accumulated.sequences += elapsed * (self.own_sequences + self.external_sequences) as f64;
        self.accumulated.tokens += elapsed * (self.own_tokens + self.external_tokens) as f64;
        self.since = now;
    }

    /// A request has its first token.
    pub(crate) fn start(&mut self, now: Seconds, sequences: u32, tokens: u64) -> DecodingRequest {
        self.advance(now);
        let sequences = u64::from(sequences);
        self.own_sequences += sequences;
        self.own_tokens += tokens;
        DecodingRequest { sequences, tokens, started_at: now, accumulated: self.accumulated }
    }

    /// It has ended. Returns for how long it generated, and the mean batch in that time.
    pub(crate) fn end(&mut self, now: Seconds, request: DecodingRequest) -> Option<(Seconds, DecodeBatch)> {
        self.advance(now);
        self.own_sequences -= request.sequences;
        self.own_tokens -= request.tokens;
        let duration = now - request.started_at;
        (duration > 0.0).then(|| {
            let mean = DecodeBatch {
                sequences: (self.accumulated.sequences - request.accumulated.sequences) / duration,
                tokens: (self.accumulated.tokens - request.accumulated.tokens) / duration,
            };
            (duration, mean)
        })
    }

    pub(crate) fn apply_report(&mut self, now: Seconds, reported: &ReportedLoad) {
        self.advance(now);
        self.external_sequences = u64::from(reported.running).saturating_sub(self.own_sequences);
        // What this gateway's sequences occupy is not known exactly, so it says little about other gateways' tokens.
        self.external_tokens = if self.external_sequences == 0 {
            0
        } else {
            reported.used_tokens.saturating_sub(self.own_tokens)
        };
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.own_sequences == 0 && self.own_tokens == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_batch_is_weighted_by_time_and_includes_other_gateways() {
        let mut tracker = DecodeTracker::default();
        let long = tracker.start(10.0, 1, 1_000);
        let short = tracker.start(12.0, 2, 4_000);
        tracker
            .apply_report(14.0, &ReportedLoad { running: 5, used_tokens: 9_000, ..ReportedLoad::default() });
        // Two seconds with three sequences, two with five.
        let batch = DecodeBatch { sequences: 4.0, tokens: 7_000.0 };
        assert_eq!(tracker.end(16.0, short), Some((4.0, batch)));
        // Two seconds alone before, four with three sequences after.
        let batch = DecodeBatch { sequences: 3.0, tokens: (2.0 + 28.0 + 20.0) * 1_000.0 / 10.0 };
        assert_eq!(tracker.end(20.0, long), Some((10.0, batch)));
        assert!(tracker.is_empty());
    }

    #[test]
    fn request_without_duration_has_no_mean() {
        let mut tracker = DecodeTracker::default();
        let request = tracker.start(1.0, 1, 10);
        assert_eq!(tracker.end(1.0, request), None);
    }
}
