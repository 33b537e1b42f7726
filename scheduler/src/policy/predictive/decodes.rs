//! The decode that goes with a prefill.

use super::super::lightest::Lightest;
use super::super::{Input, load, partners};
use crate::cluster::{Distance, Instance, InstanceIx, PairingDomain, Place};
use crate::request::Seconds;

/// Seconds that each token a decode already holds is worth: what its attention adds to a step, about a tenth of a microsecond,
/// times the steps until a later prompt's first tokens matter no more.
const SECONDS_PER_HELD_TOKEN: f64 = 1e-6;

/// Price of a decode that has no room for the prompt: it must wait until another answer ends.
const FULL: Seconds = 10.0;

/// Cheapest decodes of one request, by where the prefill is.
#[derive(Debug, Default)]
pub(super) struct Decodes {
    /// Kept between requests so that a question allocates nothing.
    found: Vec<Found>,
}

/// The cheapest decode for prefills of one domain at one place.
#[derive(Debug, Clone, Copy)]
struct Found {
    domain: PairingDomain,
    place: Place,
    decode: Option<(InstanceIx, Seconds)>,
}

impl Decodes {
    /// Another request.
    pub(super) fn begin(&mut self) {
        self.found.clear();
    }

    /// The cheapest decode for `prefill`, if any can take over, and its cost beyond the usual `handover`.
    pub(super) fn cheapest(
        &mut self,
        input: &Input<'_>,
        prefill: &Instance,
        handover: Seconds,
    ) -> Option<(InstanceIx, Seconds)> {
        let (domain, place) = (prefill.domain, prefill.place);
        if let Some(known) = self.found.iter().find(|known| known.domain == domain && known.place == place) {
            return known.decode;
        }
        let mut lightest = Lightest::new(input.entropy >> 32);
        for ix in partners(input, prefill) {
            lightest.offer(ix, cost(input, prefill, ix, handover));
        }
        let decode = lightest.found();
        self.found.push(Found { domain, place, decode });
        decode
    }
}

fn cost(input: &Input<'_>, prefill: &Instance, decode: InstanceIx, handover: Seconds) -> Seconds {
    let load = load(input, decode);
    let distance = input.cluster.get(decode).map_or(Distance::Unknown, |d| prefill.place.distance(&d.place));
    // What is usual was learned from the first tokens seen, whatever their distance.
    let beyond_usual = match distance {
        Distance::Nvlink => -0.8,
        Distance::Node => -0.5,
        Distance::Rack | Distance::Zone | Distance::Unknown => 0.0,
        Distance::Far => 3.0,
    };
    let held = load.decode_tokens();
    let capacity = load.reported.map_or(0, |reported| reported.capacity_tokens);
    let full = capacity > 0 && held + input.request.total_tokens() > capacity;
    beyond_usual * handover + held as f64 * SECONDS_PER_HELD_TOKEN + if full { FULL } else { 0.0 }
}
