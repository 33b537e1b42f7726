//! A single worker: one leg, without a transfer of KV cache.

use moongate_discovery::EngineKind;

use super::body::with_members;
use super::{ConnectorAttempt, LegConnector, PrefillLeg, sglang, vllm};
use crate::request_body::{BodyMember, SplicedBody};
use crate::upstream::PreparedRequest;

/// Sends the client's own body, unless the worker orders its queue by priority, or is an SGLang with several data-parallel ranks.
#[derive(Debug)]
pub(super) struct PlainConnector;

impl LegConnector for PlainConnector {
    fn prefill(&self, _: &ConnectorAttempt<'_>) -> Option<PrefillLeg> {
        None
    }

    /// A request without a decision is passed through unchanged, and the worker balances its own ranks.
    fn main(
        &self,
        attempt: &ConnectorAttempt<'_>,
        _: Option<&[u8]>,
    ) -> Result<PreparedRequest, &'static str> {
        let (routed, engine) = (attempt.routed, attempt.main_engine());
        if attempt.decision.is_none() {
            return Ok(routed.prepare(SplicedBody::verbatim(routed.body.clone()), Vec::new()));
        }
        let (headers, appended) = match engine.facts.map(|facts| facts.engine) {
            Some(EngineKind::Vllm) => (vllm::rank_header(engine).into_iter().collect(), None),
            Some(EngineKind::Sglang) => (Vec::new(), sglang::rank_member(engine)),
            None => (Vec::new(), None),
        };
        let priority = engine.priority(attempt.decision);
        let body = if priority.is_some() || appended.is_some() {
            let priority = priority.map(|priority| (BodyMember::Priority, priority.to_string()));
            with_members(routed, priority.into_iter().collect(), appended.unwrap_or_default())
        } else {
            SplicedBody::verbatim(routed.body.clone())
        };
        Ok(routed.prepare(body, headers))
    }
}

#[cfg(test)]
mod tests {
    use moongate_discovery::EngineFacts;
    use moongate_scheduler::{
        DecisionExplanation, EngineRoute, InstanceIndex, LoadReservation, PolicyName, RoutingDecision,
    };

    use super::*;
    use crate::connector::LegEngine;
    use crate::request_body::InferenceApi;
    use crate::routed_request::RoutedRequest;

    const BODY: &str = r#"{"prompt":"a"}"#;

    fn decision() -> RoutingDecision {
        RoutingDecision {
            route: EngineRoute::Single { worker: InstanceIndex(1), rank: 1 },
            reservation: LoadReservation::default(),
            engine_priority: None,
            predicted_ttft: None,
            expected_ttft: 0.0,
            pending_tokens: 0,
            explanation: DecisionExplanation {
                policy: PolicyName::RoundRobin,
                reason: "",
                candidates: Vec::new(),
                terms: Vec::new(),
            },
        }
    }

    /// The body and the header for rank 1 that a worker gets.
    fn request(
        kind: EngineKind,
        rank_count: u32,
        decision: Option<&RoutingDecision>,
    ) -> (String, Option<String>) {
        let (routed, facts) =
            (RoutedRequest::of_body(InferenceApi::Completions, BODY), EngineFacts::unreported(kind));
        let prefill = LegEngine { facts: Some(&facts), rank: 1, rank_count };
        let attempt = ConnectorAttempt { routed: &routed, number: 1, decision, prefill, decode: None };
        let request = PlainConnector.main(&attempt, None).unwrap();
        let header = request.extra_headers.iter().find(|(name, _)| name == "x-data-parallel-rank");
        let header = header.map(|(_, value)| value.to_str().unwrap().to_owned());
        (String::from_utf8(request.body.to_vec().to_vec()).unwrap(), header)
    }

    #[test]
    fn the_rank_is_sent_only_to_engines_with_several() {
        let (body, decision) = (BODY.to_owned(), decision());
        assert_eq!(request(EngineKind::Vllm, 2, Some(&decision)), (body.clone(), Some("1".to_owned())));
        let with_rank = r#"{"prompt":"a","routed_dp_rank":1}"#.to_owned();
        assert_eq!(request(EngineKind::Sglang, 2, Some(&decision)), (with_rank, None));
        for kind in [EngineKind::Vllm, EngineKind::Sglang] {
            assert_eq!(request(kind, 1, Some(&decision)), (body.clone(), None));
            assert_eq!(request(kind, 2, None), (body.clone(), None), "passed through");
        }
    }
}
