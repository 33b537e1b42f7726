//! A single worker: one leg, without a transfer of KV cache.

use super::body::with_priority;
use super::{ConnectorAttempt, LegConnector, PrefillLeg};
use crate::request_body::SplicedBody;
use crate::upstream::PreparedRequest;

/// Sends the client's own body, unless the worker orders its queue by priority.
#[derive(Debug)]
pub(super) struct PlainConnector;

impl LegConnector for PlainConnector {
    fn prefill(&self, _: &ConnectorAttempt<'_>) -> Option<PrefillLeg> {
        None
    }

    fn main(
        &self,
        attempt: &ConnectorAttempt<'_>,
        _: Option<&[u8]>,
    ) -> Result<PreparedRequest, &'static str> {
        let routed = attempt.routed;
        let body = match attempt.main_engine().priority(attempt.decision) {
            Some(priority) => with_priority(routed, priority),
            None => SplicedBody::verbatim(routed.body.clone()),
        };
        Ok(routed.prepare(body, Vec::new()))
    }
}
