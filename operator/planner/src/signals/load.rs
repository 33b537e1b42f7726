//! Load of the engines at one time, over all gateways.

use std::collections::BTreeMap;

use crate::deployments_file::ScaledRole;
use crate::gateway_metrics::{EngineSample, GatewaySample};
use crate::scrape::GatewayAddress;

/// Sums over all gateways.
#[derive(Debug, Clone, Default)]
pub(super) struct FleetLoad {
    /// `None` if a gateway does not report it.
    queued: Option<f64>,
    by_role: BTreeMap<ScaledRole, RoleLoad>,
}

/// Sums over the healthy engines of one role.
#[derive(Debug, Clone, Copy, Default)]
struct RoleLoad {
    engines: f64,
    /// Engines with pending prefills.
    busy: f64,
    in_flight: f64,
    pending_prefill_tokens: f64,
    active_decode_tokens: f64,
}

impl FleetLoad {
    pub(super) fn of(samples: &BTreeMap<GatewayAddress, GatewaySample>) -> Self {
        let mut engines: BTreeMap<&str, EngineSample> = BTreeMap::new();
        for (id, engine) in samples.values().flat_map(|sample| &sample.engines) {
            let sum = engines.entry(id).or_default();
            sum.role = sum.role.or(engine.role);
            sum.is_up |= engine.is_up;
            sum.in_flight += engine.in_flight;
            sum.pending_prefill_tokens += engine.pending_prefill_tokens;
            sum.active_decode_tokens += engine.active_decode_tokens;
        }
        let mut by_role: BTreeMap<ScaledRole, RoleLoad> = BTreeMap::new();
        for engine in engines.values() {
            let Some(role) = engine.role else { continue };
            let sum = by_role.entry(role).or_default();
            // An engine that has failed computes nothing, but its requests are still in flight.
            if engine.is_up {
                sum.engines += 1.0;
                sum.busy += f64::from(u8::from(engine.pending_prefill_tokens > 0.0));
            }
            sum.in_flight += engine.in_flight;
            sum.pending_prefill_tokens += engine.pending_prefill_tokens;
            sum.active_decode_tokens += engine.active_decode_tokens;
        }
        Self { queued: samples.values().map(|sample| sample.queued).sum(), by_role }
    }

    fn role(&self, role: ScaledRole) -> RoleLoad {
        self.by_role.get(&role).copied().unwrap_or_default()
    }

    /// Number of healthy engines.
    pub(super) fn engines(&self, role: ScaledRole) -> f64 {
        self.role(role).engines
    }

    /// Share of the healthy engines that compute prompts; `None` without such engines.
    pub(super) fn busy_share(&self, role: ScaledRole) -> Option<f64> {
        let load = self.role(role);
        (load.engines > 0.0).then(|| load.busy / load.engines)
    }

    pub(super) fn in_flight(&self, role: ScaledRole) -> f64 {
        self.role(role).in_flight
    }

    pub(super) fn pending_prefill_tokens(&self, role: ScaledRole) -> f64 {
        self.role(role).pending_prefill_tokens
    }

    pub(super) fn active_decode_tokens(&self, role: ScaledRole) -> f64 {
        self.role(role).active_decode_tokens
    }

    /// Requests that the gateways hold, by the role for whose engines they wait. While a prefill engine is idle, that is decode: otherwise
    /// the gateway would have used it.
    pub(super) fn queued_for(&self, (prefill, decode): (ScaledRole, ScaledRole)) -> Option<(f64, f64)> {
        let queued = self.queued?;
        let is_pair = prefill != decode;
        let has_idle_prefill = self.busy_share(prefill).is_some_and(|busy| busy < 1.0);
        let has_decode = self.engines(decode) > 0.0;
        Some(match (is_pair && has_idle_prefill, is_pair && !has_decode) {
            (true, _) => (0.0, queued),
            (false, true) => (queued, queued),
            (false, false) => (queued, 0.0),
        })
    }
}
