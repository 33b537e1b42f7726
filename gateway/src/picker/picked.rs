//! A request with its route: what the proxy has to send where.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use moongate_discovery::EngineKind;

use super::header_changes::HeaderChanges;
use super::observed::ObservedResponse;
use crate::decide::{ChosenRoute, fallback_workers};
use crate::dispatch::PickedRoute;
use crate::fleet::FleetMember;
use crate::ingress::GatewayContext;

/// The prefill engine of a pair, as llm-d's sidecar next to the decode engine reads it.
const PREFILLER: HeaderName = HeaderName::from_static("x-prefiller-host-port");
/// The data-parallel rank, as vLLM's front end reads it.
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// A request whose route is picked. Its engines count it as in flight until it is dropped, or the response that it leads to.
#[derive(Debug)]
pub struct PickedRequest {
    gateway: Arc<GatewayContext>,
    route: PickedRoute,
    client_headers: HeaderMap,
}

impl PickedRequest {
    pub(super) fn new(gateway: Arc<GatewayContext>, route: PickedRoute, client_headers: HeaderMap) -> Self {
        Self { gateway, route, client_headers }
    }

    /// `host:port` of the engine that gets the request, and then of at most `fallbacks` others in case it fails, best first.
    #[must_use]
    pub fn endpoints(&self, fallbacks: usize) -> Vec<String> {
        let PickedRoute { routed, choice, .. } = &self.route;
        let main = main_engine(&choice.chosen);
        let others = fallback_workers(routed, &choice.chosen, fallbacks);
        [main].into_iter().chain(&others).map(|engine| engine.endpoint.pool.authority().to_owned()).collect()
    }

    /// What has to change in the client's headers.
    #[must_use]
    pub fn header_changes(&self) -> HeaderChanges {
        let PickedRoute { routed, choice, .. } = &self.route;
        let mut changes = HeaderChanges::between(&self.client_headers, &routed.headers);
        let ChosenRoute { prefill, decode, .. } = &choice.chosen;
        let is_ranked = |engine: &FleetMember| {
            engine.rank_count() > 1 && engine.facts().is_some_and(|facts| facts.engine == EngineKind::Vllm)
        };
        let added = match decode {
            Some(_) => HeaderValue::try_from(prefill.endpoint.pool.authority())
                .ok()
                .map(|prefill| (PREFILLER, prefill)),
            None if choice.chosen.decision.is_some() && is_ranked(prefill) => {
                Some((RANK, HeaderValue::from(prefill.rank)))
            }
            None => None,
        };
        if let Some((name, value)) = added {
            changes.remove.retain(|removed| *removed != name);
            changes.set.push((name, value));
        }
        changes
    }

    /// The body that the engine gets: the client's, unless its model is an alias or it had members that only a gateway may set.
    #[must_use]
    pub fn body(&self) -> &Bytes {
        &self.route.routed.body
    }

    /// The request is sent: its body is released, and its response is observed.
    #[must_use]
    pub fn sent(self) -> ObservedResponse {
        let mut route = self.route;
        route.routed.body = Bytes::new();
        ObservedResponse::new(self.gateway, route)
    }
}

/// The engine that answers the client.
pub(super) fn main_engine(chosen: &ChosenRoute) -> &FleetMember {
    chosen.decode.as_ref().unwrap_or(&chosen.prefill)
}
