//! The decode that goes with a prefill.

use super::super::min_cost::MinCostSampler;
use super::super::{PolicyInput, load, pairable_decodes};
use crate::fleet::{InstanceIndex, LocationIds, PairingDomain, SchedulableInstance, TopologyDistance};
use crate::request::Seconds;

/// Seconds that each token a decode already holds is worth: what its attention adds to a step, about a tenth of a microsecond,
/// times the steps until a later prompt's first tokens matter no more.
const SECONDS_PER_HELD_TOKEN: f64 = 1e-6;

/// Price of a decode that has no room for the prompt: it must wait until another answer ends.
const NO_CAPACITY_COST: Seconds = 10.0;

/// Cheapest decodes of one request, by where the prefill is.
#[derive(Debug, Default)]
pub(super) struct DecodeChoiceCache {
    /// Kept between requests so that a question allocates nothing.
    entries: Vec<CachedDecodeChoice>,
}

/// The cheapest decode for prefills of one domain at one place.
#[derive(Debug, Clone, Copy)]
struct CachedDecodeChoice {
    domain: PairingDomain,
    location: LocationIds,
    decode: Option<(InstanceIndex, Seconds)>,
}

impl DecodeChoiceCache {
    /// Another request.
    pub(super) fn begin(&mut self) {
        self.entries.clear();
    }

    /// The cheapest decode for `prefill`, if any can take over, and its cost beyond the usual `handover`.
    pub(super) fn cheapest(
        &mut self,
        input: &PolicyInput<'_>,
        prefill: &SchedulableInstance,
        handover: Seconds,
    ) -> Option<(InstanceIndex, Seconds)> {
        let (domain, place) = (prefill.domain, prefill.place);
        if let Some(known) =
            self.entries.iter().find(|known| known.domain == domain && known.location == place)
        {
            return known.decode;
        }
        let mut lightest = MinCostSampler::new(input.entropy >> 32);
        for ix in pairable_decodes(input, prefill) {
            lightest.offer(ix, cost(input, prefill, ix, handover));
        }
        let decode = lightest.into_best();
        self.entries.push(CachedDecodeChoice { domain, location: place, decode });
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
    let distance =
        input.cluster.get(decode).map_or(TopologyDistance::Unknown, |d| prefill.place.distance(&d.place));
    // What is usual was learned from the first tokens seen, whatever their distance.
    let beyond_usual = match distance {
        TopologyDistance::Nvlink => -0.8,
        TopologyDistance::Node => -0.5,
        TopologyDistance::Rack | TopologyDistance::Zone | TopologyDistance::Unknown => 0.0,
        TopologyDistance::CrossZone => 3.0,
    };
    let held = load.decode_tokens();
    let capacity = load.reported.map_or(0, |reported| reported.capacity_tokens);
    let full = capacity > 0 && held + input.request.total_tokens() > capacity;
    beyond_usual * handover + held as f64 * SECONDS_PER_HELD_TOKEN + if full { NO_CAPACITY_COST } else { 0.0 }
}
