//! Choice of the decode for a prefill.

use super::super::min_cost::MinCostSampler;
use super::super::{PolicyInput, all_pairable_decodes, load};
use super::round_plan::RoundPlan;
use crate::fleet::{
    InstanceIndex, InstanceRole, LocationIds, PairingDomain, SchedulableInstance, TopologyDistance,
};
use crate::seconds::Seconds;

/// Seconds of a first token that a second of the decode's step time is worth. A larger value balances decodes more, and
/// pays for it with longer transfers.
pub(super) const STEP_WEIGHT: f64 = 30.0;

/// A decode that could take over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct DecodeChoice {
    pub(super) decode: InstanceIndex,
    /// Seconds until its KV cache is expected to have room for the request.
    pub(super) wait: Seconds,
    /// Seconds until its steps are expected to meet the target with the request.
    pub(super) pace_wait: Seconds,
    /// Price of its step time and of its distance.
    pub(super) cost: Seconds,
    /// Seconds until it has loaded the request's LoRA adapter.
    pub(super) adapter_load: Seconds,
}

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
    choice: Option<DecodeChoice>,
}

impl DecodeChoiceCache {
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Starts a request whose cheapest decode for prefills at the location of this one was found before.
    pub(super) fn start_with(&mut self, prefill: &SchedulableInstance, choice: Option<DecodeChoice>) {
        self.entries.clear();
        if choice.is_some() && prefill.role == InstanceRole::Prefill {
            let SchedulableInstance { domain, location, .. } = *prefill;
            self.entries.push(CachedDecodeChoice { domain, location, choice });
        }
    }

    /// The cheapest decode for `prefill`, if any can take over. `handover` is the usual time of the transfer.
    pub(super) fn cheapest(
        &mut self,
        input: &PolicyInput<'_>,
        plan: &RoundPlan,
        tpot_target: Option<Seconds>,
        prefill: &SchedulableInstance,
        handover: Seconds,
    ) -> Option<DecodeChoice> {
        let (domain, location) = (prefill.domain, prefill.location);
        if let Some(entry) =
            self.entries.iter().find(|entry| entry.domain == domain && entry.location == location)
        {
            return entry.choice;
        }
        let mut lightest = MinCostSampler::new(input.entropy >> 32);
        for decode in all_pairable_decodes(input, prefill) {
            let DecodeRoom { wait, pace_wait, step } = room(input, plan, tpot_target, decode);
            let cost = STEP_WEIGHT * step + distance_price(input, prefill, decode, handover);
            let adapter_load = input.adapters.of(decode).wait();
            let choice = DecodeChoice { decode, wait, pace_wait, cost, adapter_load };
            lightest.offer(choice, wait.max(pace_wait) + cost + adapter_load);
        }
        let choice = lightest.into_best().map(|(choice, _)| choice);
        self.entries.push(CachedDecodeChoice { domain, location, choice });
        choice
    }
}

pub(super) struct DecodeRoom {
    pub(super) wait: Seconds,
    pub(super) pace_wait: Seconds,
    /// Step time with the request.
    pub(super) step: Seconds,
}

/// When a decode has room for the request.
pub(super) fn room(
    input: &PolicyInput<'_>,
    plan: &RoundPlan,
    tpot_target: Option<Seconds>,
    decode: InstanceIndex,
) -> DecodeRoom {
    let load = load(input, decode);
    let (now, planned) = (load.decode_batch(), plan.decode_batch(decode));
    let then = now + planned + input.expected_batch();
    let step = load.decode_step.seconds(then);
    // A request that is larger than the engine runs alone.
    if now.sequences + planned.sequences == 0.0 {
        return DecodeRoom { wait: 0.0, pace_wait: 0.0, step };
    }
    let capacity = load.reported.map_or(0, |reported| reported.capacity_tokens);
    let no_room = if capacity > 0 { (then.tokens - capacity as f64) / now.tokens.max(1.0) } else { 0.0 };
    let too_slow = tpot_target.map_or(0.0, |target| {
        let limit = load.decode_step.max_sequences(target, then.tokens / then.sequences);
        // No batch meets a target that even one sequence misses.
        if limit < 1.0 { 0.0 } else { (then.sequences - limit) / now.sequences.max(1.0) }
    });
    // Sequences leave evenly over the time that one of them takes.
    let residence = load.response_tokens * load.decode_step.seconds(now);
    DecodeRoom { wait: no_room.max(0.0) * residence, pace_wait: too_slow.max(0.0) * residence, step }
}

fn distance_price(
    input: &PolicyInput<'_>,
    prefill: &SchedulableInstance,
    decode: InstanceIndex,
    handover: Seconds,
) -> Seconds {
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
    beyond_usual * handover
}
