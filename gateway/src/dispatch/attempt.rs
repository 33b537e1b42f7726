//! One attempt on one route: loads the LoRA adapter, starts the legs and waits for the start of the response.

use std::sync::Arc;

use super::adapter_loader::AdapterLoader;
use crate::connector::start_legs;
use crate::decide::ChosenRoute;
use crate::legs::{AttemptContext, AttemptFailure, AttemptSilenceLimits, ResponseStart, first_bytes};
use crate::routed_request::RoutedRequest;
use crate::upstream::LegKind;

/// Runs one attempt until the response has started. Engines load the request's LoRA adapter first, if they have not.
pub(super) async fn attempt(
    routed: &RoutedRequest,
    chosen: ChosenRoute,
    adapters: &Arc<AdapterLoader>,
    context: &AttemptContext<'_>,
) -> Result<Box<ResponseStart>, AttemptFailure> {
    adapters.load_on_route(routed, &chosen).await?;
    let ChosenRoute { prefill, decode, in_flight, decision: fleet_decision } = chosen;
    let decision = fleet_decision.as_ref().map(|fleet_decision| &*fleet_decision.decision);
    let silence_limits = decision.and_then(|decision| {
        let expected = decision.expected_ttft.max(decision.predicted_ttft.unwrap_or(0.0));
        let expected = context.redispatch.admission.to_wall_time(expected);
        AttemptSilenceLimits::new(prefill.endpoint.silence.limits(), expected, routed)
    });
    let (pair, stale_prefill) =
        start_legs(routed, decision, (&prefill, decode.as_ref()), silence_limits, context).await?;
    first_bytes(routed, pair.with_silence_limits(silence_limits), in_flight, context).await.map_err(
        |mut failure| {
            if failure.side == LegKind::Decode && failure.error.blames_engine() {
                failure.stale_prefill = stale_prefill.then_some(prefill);
            }
            failure
        },
    )
}
