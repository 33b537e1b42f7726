//! NVIDIA Dynamo's KV router (1.6): blocks to compute less credit for blocks that are cached.

use super::{
    Input, Policy, PolicyName, Verdict, conclude, is_prefill, lightest, load, open_entries, partners,
};
use crate::cluster::{InstanceIx, Load, Role};
use crate::decision::{Booking, Candidate, Refusal, Term};

/// What a cached token is worth, if one on the device is worth 1 (`overlap_score_credit`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Credits {
    /// In host memory (`host_cache_hit_weight`).
    pub(super) host: f64,
    /// In the shared store (`shared_cache_multiplier`).
    pub(super) shared: f64,
}

/// Without settings there is no shared store (`shared_cache_type=none`).
const DEFAULT: Credits = Credits { host: 0.75, shared: 0.0 };

/// Dynamo without a shared store, as it is without settings.
///
/// The prefill with the least uncached work, decided on arrival; equals are drawn. The decode with the fewest blocks.
#[derive(Debug)]
pub(super) struct Dynamo;

impl Policy for Dynamo {
    fn name(&self) -> PolicyName {
        PolicyName::Dynamo
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        let open = open_entries(input)?;
        least_cost(input, self.name(), &open, DEFAULT)
    }
}

/// Dynamo's choice among `open`, which is not empty. Costs are its blocks times the tokens of a block, which changes no order.
pub(super) fn least_cost(
    input: &Input<'_>,
    policy: PolicyName,
    open: &[InstanceIx],
    credits: Credits,
) -> Result<Verdict, Refusal> {
    let candidates: Vec<Candidate> = open.iter().map(|&instance| price(input, instance, credits)).collect();
    let entry = lightest(candidates.iter().map(|c| (c.instance, c.cost)), input.entropy);
    let Some(entry) = entry else { return Err(Refusal::UnknownModel) };
    // Its decode router gets no cache credit and counts its own requests alone.
    let decode = is_prefill(input, entry).and_then(|prefill| {
        let held = partners(input, prefill).map(|ix| (ix, load(input, ix).active_decode_tokens as f64));
        lightest(held, input.entropy >> 32)
    });
    let verdict = conclude(input, policy, "least uncached work", entry, decode, candidates);
    Ok(match verdict {
        Verdict::Send(mut decision) => {
            let new = f64::from(input.request.input_tokens) - own_credit(input, entry, credits);
            decision.booking = Booking { prefill_tokens: new.max(1.0) as u64, ..decision.booking };
            Verdict::Send(decision)
        }
        hold => hold,
    })
}

fn price(input: &Input<'_>, instance: InstanceIx, credits: Credits) -> Candidate {
    let load = load(input, instance);
    let credit = own_credit(input, instance, credits) + credits.shared * shared_tokens(input, instance);
    let raw = load.pending_prefill_tokens as f64 + f64::from(input.request.input_tokens);
    let prefill = (raw - credit).max(0.0);
    let leading_term = if load.pending_prefill_tokens > u64::from(input.request.input_tokens) {
        Term::Backlog
    } else {
        Term::Service
    };
    Candidate { instance, cost: prefill + decode_term(input, instance, &load), leading_term }
}

/// A router of prefills alone is told not to count decode blocks.
fn decode_term(input: &Input<'_>, instance: InstanceIx, load: &Load) -> f64 {
    match input.cluster.get(instance).map(|instance| instance.role) {
        Some(Role::Plain) => load.active_decode_tokens as f64,
        _ => 0.0,
    }
}

/// Tokens that Dynamo takes for cached in the engine itself. It is also what it leaves out of the engine's load.
pub(super) fn own_credit(input: &Input<'_>, instance: InstanceIx, credits: Credits) -> f64 {
    let hits = input.prediction.hits(instance);
    f64::from(hits.l1_tokens) + credits.host * f64::from(hits.l2_tokens)
}

/// Tokens in the shared store beyond those on the device. Dynamo counts those in host memory too, so that they earn both
/// credits, and those behind a gap, which no engine can use.
fn shared_tokens(input: &Input<'_>, instance: InstanceIx) -> f64 {
    let hits = input.prediction.hits(instance);
    if input.prediction.shared.is_empty() {
        return f64::from(hits.l3_tokens);
    }
    let beyond = |run: &crate::L3Run| {
        let end = run.first_token.saturating_add(run.tokens);
        end.saturating_sub(run.first_token.max(hits.l1_tokens))
    };
    input.prediction.shared.iter().map(|run| f64::from(beyond(run))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::scene::Scene;
    use crate::prediction::L3Run;

    #[test]
    fn credits_differ_by_tier() {
        let mut scene = Scene::new(2);
        scene.cached(0, 0, 600, 0);
        scene.cached(1, 400, 0, 0);
        assert_eq!(scene.send(&mut Dynamo), 0);
        scene.cached(1, 500, 0, 0);
        assert_eq!(scene.send(&mut Dynamo), 1);
    }

    #[test]
    fn waiting_tokens_weigh_like_own_ones() {
        let mut scene = Scene::new(2);
        scene.cached(0, 500, 0, 0);
        scene.loads[0].pending_prefill_tokens = 499;
        assert_eq!(scene.send(&mut Dynamo), 0);
        scene.loads[0].pending_prefill_tokens = 501;
        assert_eq!(scene.send(&mut Dynamo), 1);
    }

    #[test]
    fn a_prefill_has_no_decode_term_but_a_worker_has() {
        let mut scene = Scene::new(2);
        scene.loads[0].active_decode_tokens = 10_000;
        assert!(scene.draws(&mut Dynamo)[0] > 100);
        let plain = scene.cluster.instances().iter().cloned().map(|mut instance| {
            instance.role = Role::Plain;
            instance
        });
        scene.cluster = crate::Cluster::new(plain.collect());
        assert_eq!(scene.draws(&mut Dynamo)[0], 0);
    }

    #[test]
    fn the_decode_with_the_fewest_blocks_is_taken() {
        let mut scene = Scene::new(1);
        scene.loads[1].active_decode_tokens = 10;
        assert_eq!(scene.decision(&mut Dynamo).route.exit(), InstanceIx(2));
        scene.loads[2].active_decode_tokens = 20;
        assert_eq!(scene.decision(&mut Dynamo).route.exit(), InstanceIx(1));
    }

    /// The known failure: the load it books is what it credits, so that a page in host memory counts as a quarter of its work
    /// although the engine computes none of it.
    #[test]
    fn what_is_booked_follows_the_credits() {
        let mut scene = Scene::new(1);
        scene.cached(0, 200, 400, 300);
        assert_eq!(scene.decision(&mut Dynamo).booking.prefill_tokens, 500);
        scene.cached(0, 1000, 0, 0);
        assert_eq!(scene.decision(&mut Dynamo).booking.prefill_tokens, 1);
    }

    /// The known failure: a page in host memory and in the store earns more than one on the device, and a page behind a gap earns
    /// as much as a usable one.
    #[test]
    fn shared_pages_earn_twice_and_behind_gaps() {
        let mut scene = Scene::new(2);
        let run = |first_token, tokens| L3Run { first_token, tokens };
        scene.prediction.shared = vec![run(0, 400), run(800, 200)];
        scene.cached(0, 400, 0, 0);
        scene.cached(1, 0, 400, 0);
        let input = scene.input();
        assert_eq!(shared_tokens(&input, InstanceIx(0)), 200.0);
        assert_eq!(shared_tokens(&input, InstanceIx(1)), 600.0);
        let verdict = least_cost(
            &input,
            PolicyName::Dynamo,
            &[InstanceIx(0), InstanceIx(1)],
            Credits { shared: 0.5, ..DEFAULT },
        );
        let Ok(Verdict::Send(decision)) = verdict else { panic!("a decision") };
        assert_eq!(decision.route.entry(), InstanceIx(1));
    }

    #[test]
    fn without_runs_the_usable_part_counts() {
        let mut scene = Scene::new(1);
        scene.cached(0, 100, 0, 300);
        assert_eq!(shared_tokens(&scene.input(), InstanceIx(0)), 300.0);
    }

    #[test]
    fn the_shared_store_is_unknown_without_settings_and_equals_are_drawn() {
        let mut scene = Scene::new(3);
        scene.cached(0, 0, 0, 900);
        let draws = scene.draws(&mut Dynamo);
        assert!(draws[..3].iter().all(|&times| times > 60), "{draws:?}");
    }
}
