//! Choice of the decode for a prefill.

use super::super::min_cost::MinCostSampler;
use super::super::{PolicyInput, load, pairable_decodes};
use crate::fleet::{InstanceIndex, LocationIds, PairingDomain, SchedulableInstance, TopologyDistance};
use crate::seconds::Seconds;

/// Cost in seconds per token that a decode already has: its attention adds about 0.1 µs to a step, times the number
/// of steps over which a later prompt's first token is affected.
const SECONDS_PER_HELD_TOKEN: f64 = 1e-6;

/// Cost of a decode without capacity for the prompt: the prompt must wait until another response ends.
const NO_CAPACITY_COST: Seconds = 10.0;

/// Cheapest decodes of one request, by location of the prefill.
#[derive(Debug, Default)]
pub(super) struct DecodeChoiceCache {
    /// Reused between requests to avoid allocations.
    entries: Vec<CachedDecodeChoice>,
}

/// The cheapest decode for prefills of one domain at one location.
#[derive(Debug, Clone, Copy)]
struct CachedDecodeChoice {
    domain: PairingDomain,
    location: LocationIds,
    decode: Option<(InstanceIndex, Seconds)>,
}

impl DecodeChoiceCache {
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }

    /// The cheapest decode for `prefill`, if any can take over, and its cost beyond the usual `handover`.
    pub(super) fn cheapest(
        &mut self,
        input: &PolicyInput<'_>,
        prefill: &SchedulableInstance,
        handover: Seconds,
    ) -> Option<(InstanceIndex, Seconds)> {
        let (domain, location) = (prefill.domain, prefill.location);
        if let Some(entry) =
            self.entries.iter().find(|entry| entry.domain == domain && entry.location == location)
        {
            return entry.decode;
        }
        let mut lightest = MinCostSampler::new(input.entropy >> 32);
        for ix in pairable_decodes(input, prefill) {
            lightest.offer(ix, cost(input, prefill, ix, handover));
        }
        let decode = lightest.into_best();
        self.entries.push(CachedDecodeChoice { domain, location, decode });
        decode
    }
}

fn cost(
    input: &PolicyInput<'_>,
    prefill: &SchedulableInstance,
    decode: InstanceIndex,
    handover: Seconds,
) -> Seconds {
    let load = load(input, decode);
    let distance = input
        .cluster
        .get(decode)
        .map_or(TopologyDistance::Unknown, |d| prefill.location.distance(&d.location));
    // The usual hand-over time was learned from observed first tokens at any distance.
    let beyond_usual = match distance {
        TopologyDistance::Nvlink => -0.8,
        TopologyDistance::Node => -0.5,
        TopologyDistance::Rack | TopologyDistance::Zone | TopologyDistance::Unknown => 0.0,
        TopologyDistance::CrossZone => 3.0,
    };
    let decode_tokens = load.decode_tokens();
    let capacity = load.reported.map_or(0, |reported| reported.capacity_tokens);
    let full = capacity > 0 && decode_tokens + input.request.total_tokens() > capacity;
    beyond_usual * handover
        + decode_tokens as f64 * SECONDS_PER_HELD_TOKEN
        + if full { NO_CAPACITY_COST } else { 0.0 }
}
