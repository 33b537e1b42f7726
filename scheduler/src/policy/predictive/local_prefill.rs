//! Requests that a decode serves alone: it computes the prompt between the steps of its sequences, which wait for it.

use super::super::{PolicyInput, load};
use super::decode_choice::{DecodeChoice, DecodeRoom, STEP_WEIGHT, room};
use super::round_plan::RoundPlan;
use crate::estimate::PrefillEstimate;
use crate::fleet::{InstanceIndex, InstanceLoad, PREFILL_SHARE_S};
use crate::seconds::Seconds;

/// Price of a second by which a prompt delays a sequence that generates, in seconds of a first token.
const STALL_PRICE: f64 = 0.05;

/// A prompt may take at most this share of what the sequences can wait in their time and still meet the target.
const MAX_STALL_SHARE: f64 = 0.25;

/// The decode at `ix` as the engine that computes the prompt, too; `None` if its sequences would miss the target.
pub(super) fn local_choice(
    input: &PolicyInput<'_>,
    plan: &RoundPlan,
    target: Seconds,
    ix: InstanceIndex,
    estimate: &PrefillEstimate,
) -> Option<DecodeChoice> {
    let DecodeRoom { wait, pace_wait, step } = room(input, plan, Some(target), ix);
    if wait > 0.0 || pace_wait > 0.0 {
        return None;
    }
    let load = load(input, ix);
    let sequences = load.decode_batch().sequences;
    let stall = estimate.service;
    let longest = MAX_STALL_SHARE * load.response_tokens * (target - step);
    if sequences > 0.0 && (stall > longest || stall > spare_seconds(&load, target, step)) {
        return None;
    }
    let cost = STEP_WEIGHT * step + STALL_PRICE * sequences * stall;
    let adapter_load = estimate.adapter_load;
    Some(DecodeChoice { decode: ix, wait, pace_wait, cost, adapter_load })
}

/// Computation that a decode can be sent now so that its steps, of `step` seconds without it, meet the target.
fn spare_seconds(load: &InstanceLoad, target: Seconds, step: Seconds) -> Seconds {
    (1.0 - step / target - load.prefill_share) * PREFILL_SHARE_S
}

/// Whether a decode can be sent any prompt now.
pub(super) fn has_spare_time(load: &InstanceLoad, target: Seconds) -> bool {
    let batch = load.decode_batch();
    batch.sequences == 0.0 || spare_seconds(load, target, load.decode_step.seconds(batch)) > 0.0
}

#[cfg(test)]
mod tests {
    use super::super::super::fixture::PolicyFixture;
    use super::super::PredictivePolicy;
    use crate::decision::EngineRoute;
    use crate::decode_step::DecodeStepModel;
    use crate::fleet::{InstanceIndex, InstanceRole};
    use crate::options::SchedulerOptions;
    use crate::policy::{Policy, PolicyVerdict, ScheduleRound};
    use crate::prefill_time::PrefillTimeModel;

    /// A prefill that is busy for 10 s, and two decodes with a second sequence, whose steps take 20 ms; a millisecond
    /// per prompt token.
    fn busy_prefill() -> PolicyFixture {
        let mut fixture = PolicyFixture::new(1).with_local_prefill();
        for load in &mut fixture.loads {
            load.service = PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 };
            load.decode_step = DecodeStepModel { base: 0.02, per_sequence: 0.0, per_token: 0.0, speed: 1.0 };
            load.response_tokens = 200.0;
        }
        fixture.loads[0].prefill_wait = 10.0;
        fixture.loads[1].decode_sequences = 2;
        fixture.loads[2].decode_sequences = 1;
        fixture
    }

    /// The engine that computes the prompt and decodes; `None` if the request is queued or gets a pair.
    fn local(fixture: &PolicyFixture, tpot_target: Option<f64>) -> Option<InstanceIndex> {
        let settings = SchedulerOptions { tpot_target, ..SchedulerOptions::default() };
        let mut policy = PredictivePolicy::new(&settings);
        policy.begin_round(&ScheduleRound {
            cluster: &fixture.cluster,
            loads: &fixture.loads,
            refreshed: None,
            refreshed_at: &[],
            queued_requests: 1,
            max_store_fetch_tokens: 0.0,
            max_adapter_load: 0.0,
            now: 0.0,
        });
        match fixture.verdict(&mut policy) {
            Ok(PolicyVerdict::Send(decision)) => match decision.route {
                EngineRoute::Single { worker, .. } => {
                    assert_eq!(
                        fixture.cluster.get(worker).map(|engine| engine.role),
                        Some(InstanceRole::Decode)
                    );
                    assert!(decision.explanation.candidates.iter().any(|engine| engine.instance == worker));
                    Some(worker)
                }
                EngineRoute::Pair { .. } => None,
            },
            Ok(PolicyVerdict::Defer { .. }) => None,
            Err(rejection) => panic!("rejected: {rejection}"),
        }
    }

    #[test]
    fn decode_computes_a_prompt_that_would_wait_longer() {
        let mut fixture = busy_prefill();
        assert_eq!(local(&fixture, Some(0.05)), Some(InstanceIndex(2)));
        fixture.loads[0].prefill_wait = 0.0;
        assert_eq!(local(&fixture, Some(0.05)), None);
    }

    #[test]
    fn decode_computes_nothing_without_a_target() {
        assert_eq!(local(&busy_prefill(), None), None);
    }

    #[test]
    fn decode_that_cannot_compute_prompts_gets_none() {
        let mut fixture = busy_prefill();
        let instances = fixture.cluster.instances().iter().cloned();
        let instances = instances.map(|mut instance| {
            instance.local_prefill = false;
            instance
        });
        fixture.cluster = crate::fleet::SchedulableFleet::new(instances.collect());
        assert_eq!(local(&fixture, Some(0.05)), None);
    }

    #[test]
    fn prompt_that_delays_sequences_too_long_goes_elsewhere() {
        let mut fixture = busy_prefill();
        // A quarter of 200 tokens, each of which can take 30 ms longer.
        fixture.request.input_tokens = 1_490;
        assert_eq!(local(&fixture, Some(0.05)), Some(InstanceIndex(2)));
        fixture.request.input_tokens = 1_510;
        assert_eq!(local(&fixture, Some(0.05)), None);
        // What is cached there need not be computed.
        fixture.set_cached(1, 1_000, 0, 0);
        assert_eq!(local(&fixture, Some(0.05)), Some(InstanceIndex(1)));
    }

    #[test]
    fn prompts_take_only_the_share_of_time_that_the_steps_leave() {
        let mut fixture = busy_prefill();
        // Steps of 20 ms leave 60 %; the prompt takes a second of five.
        (fixture.loads[1].prefill_share, fixture.loads[2].prefill_share) = (0.41, 0.39);
        assert_eq!(local(&fixture, Some(0.05)), Some(InstanceIndex(2)));
        fixture.loads[2].prefill_share = 0.41;
        assert_eq!(local(&fixture, Some(0.05)), None);
        // An idle engine has no sequences to delay.
        fixture.loads[1].decode_sequences = 0;
        assert_eq!(local(&fixture, Some(0.05)), Some(InstanceIndex(1)));
    }
}
