//! Starts the legs of an attempt in their connector's order.

use moongate_scheduler::RoutingDecision;
use tokio::time::Instant;

use super::{ConnectorAttempt, LegEngine, LegOrder, PrefillLeg, for_attempt};
use crate::feedback::AttemptTrace;
use crate::fleet::FleetMember;
use crate::legs::{
    AttemptContext, AttemptFailure, AttemptSilenceLimits, LegPair, RunningLeg, prefill_response,
};
use crate::response::TokenUsage;
use crate::routed_request::RoutedRequest;
use crate::upstream::{LegExchange, LegKind, LegTimeouts, PreparedRequest};

fn start_leg(
    side: LegKind,
    member: &FleetMember,
    mut request: PreparedRequest,
    limits: LegTimeouts,
    trace: &AttemptTrace<'_>,
) -> RunningLeg {
    let now = Instant::now();
    let span = trace.leg(side, member, now);
    request.extra_headers.extend(span.headers());
    let endpoint = &member.endpoint;
    RunningLeg::new(LegExchange::start(endpoint.pool.clone(), request, limits, now), endpoint.clone(), span)
}

/// Starts the legs of a route in their connector's order. Also returns whether they depend on the prefill's facts.
pub(crate) async fn start_legs(
    routed: &RoutedRequest,
    decision: Option<&RoutingDecision>,
    (prefill, decode): (&FleetMember, Option<&FleetMember>),
    silence_limits: Option<AttemptSilenceLimits>,
    context: &AttemptContext<'_>,
) -> Result<(Box<LegPair>, bool), AttemptFailure> {
    let AttemptContext { limits, aborter, attempt: trace, .. } = *context;
    let translated = decode.and_then(|_| routed.translated_for(prefill));
    let (is_translated, routed) = (translated.is_some(), translated.unwrap_or(routed));
    let fail = |what| AttemptFailure::unusable_prefill(prefill, what);
    let attempt = connector_attempt(routed, trace.number, decision, (prefill, decode));
    let connector = for_attempt(&attempt).map_err(fail)?;
    let (main_kind, main_member) = match decode {
        Some(decode) => (LegKind::Decode, decode),
        None => (LegKind::Worker, prefill),
    };
    let start_prefill = |request| {
        let leg = start_leg(LegKind::Prefill, prefill, request, limits.prefill, trace);
        leg.generating().with_request_id(connector.abort_id())
    };
    let start_main = |request| {
        let leg = start_leg(main_kind, main_member, request, limits.main_timeouts(routed), trace);
        let leg = leg.with_request_id(connector.abort_id());
        // Without a decision, the engine may compute no tokens.
        if decision.is_some() { leg.generating() } else { leg }
    };
    let pair = |prefill, main| LegPair::new(prefill, main, main_kind, aborter.clone());
    let legs = match connector.prefill(&attempt) {
        None => {
            let main = connector.main(&attempt, None).map_err(fail)?;
            pair(None, start_main(main))
        }
        Some(PrefillLeg { request, order: LegOrder::Together { may_cancel } }) => {
            let main = connector.main(&attempt, None).map_err(fail)?;
            let leg = start_prefill(request);
            let leg = if may_cancel { leg } else { leg.run_to_completion() };
            pair(Some(leg), start_main(main))
        }
        Some(PrefillLeg { request, order: LegOrder::PrefillFirst }) => {
            let leg = start_prefill(request);
            let response = prefill_response(routed, leg, silence_limits, context).await?;
            prefill.endpoint.breaker.record_success();
            let main = connector.main(&attempt, Some(&response)).map_err(fail)?;
            pair(None, start_main(main)).after_prefill(TokenUsage::read(&response))
        }
    };
    let legs = if is_translated { legs.translated() } else { legs };
    Ok((legs, connector.depends_on_prefill_facts()))
}

fn connector_attempt<'a>(
    routed: &'a RoutedRequest,
    number: u32,
    decision: Option<&'a RoutingDecision>,
    (prefill, decode): (&'a FleetMember, Option<&'a FleetMember>),
) -> ConnectorAttempt<'a> {
    let leg = |member: &'a FleetMember| LegEngine {
        facts: member.facts(),
        rank: member.rank,
        rank_count: member.rank_count(),
    };
    ConnectorAttempt { routed, number, decision, prefill: leg(prefill), decode: decode.map(leg) }
}
