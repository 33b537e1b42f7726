//! Properties of every policy, over random sequences of calls.

use std::sync::Arc;

use proptest::prelude::*;

use super::PolicyName;
use crate::attempt::AttemptId;
use crate::cache_params::EngineCacheParams;
use crate::decision::EngineRoute;
use crate::fleet::{
    InstanceIndex, InstanceRole, LocationIds, ModelIndex, PairingDomain, ReportedLoad, SchedulableFleet,
    SchedulableInstance,
};
use crate::options::SchedulerOptions;
use crate::prediction::{CacheHitPrediction, TierHits};
use crate::request::RequestProfile;
use crate::scheduler::{ScheduleRequest, Scheduler, SchedulerEvent};

const ENGINES: usize = 10;

#[derive(Debug, Clone)]
struct GeneratedEngine {
    role: InstanceRole,
    domain: u32,
    model: u32,
    available: bool,
    reported: Option<(u32, u64)>,
}

#[derive(Debug, Clone)]
struct GeneratedStep {
    branch: u64,
    pages: u64,
    hits: Vec<(u32, u32, u32)>,
    excluded: Vec<usize>,
    /// How the previous requests continue: each of them may get its first token, and may end.
    ends: u64,
    entropy: u64,
}

fn engine() -> impl Strategy<Value = GeneratedEngine> {
    let role =
        prop_oneof![Just(InstanceRole::Prefill), Just(InstanceRole::Decode), Just(InstanceRole::Plain)];
    let reported = prop::option::of((0_u32..50, 0_u64..200_000));
    (role, 0_u32..2, 0_u32..2, prop::bool::weighted(0.8), reported).prop_map(
        |(role, domain, model, available, reported)| GeneratedEngine {
            role,
            domain,
            model,
            available,
            reported,
        },
    )
}

fn step() -> impl Strategy<Value = GeneratedStep> {
    let hits = prop::collection::vec((0_u32..2000, 0_u32..2000, 0_u32..2000), ENGINES);
    let excluded = prop::collection::vec(0..ENGINES, 0..3);
    (0_u64..4, 1_u64..60, hits, excluded, any::<u64>(), any::<u64>()).prop_map(
        |(branch, pages, hits, excluded, ends, entropy)| GeneratedStep {
            branch,
            pages,
            hits,
            excluded,
            ends,
            entropy,
        },
    )
}

fn cluster(fleet: &[GeneratedEngine]) -> SchedulableFleet {
    let instance = |(index, engine): (usize, &GeneratedEngine)| SchedulableInstance {
        name: format!("engine-{index}").into(),
        role: engine.role,
        models: vec![ModelIndex(engine.model)],
        loadable: Vec::new(),
        domain: PairingDomain(engine.domain),
        rank: index as u32 % 3,
        location: LocationIds::default(),
        cache: EngineCacheParams::default(),
        local_prefill: index % 2 == 0,
    };
    SchedulableFleet::new(fleet.iter().enumerate().map(instance).collect())
}

fn schedule_request(step: &GeneratedStep, engines: usize) -> ScheduleRequest {
    let hits = |&(l1_tokens, l2_tokens, l3_tokens): &_| TierHits {
        l1_tokens,
        l2_tokens,
        l3_tokens,
        ..TierHits::default()
    };
    // Prompts share their first block.
    let pages = (0..step.pages).map(|index| if index == 0 { 0 } else { step.branch * 1000 + index });
    ScheduleRequest {
        request: RequestProfile {
            model: ModelIndex(0),
            input_tokens: step.pages as u32 * 100,
            max_output_tokens: Some(100),
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        },
        prediction: CacheHitPrediction {
            per_instance: step.hits.iter().take(engines).map(hits).collect(),
            network_distance: Vec::new(),
            shared: Vec::new(),
            pages: pages.collect(),
            text_prefixes: Arc::default(),
            page_tokens: 100,
            excludes_pending: false,
        },
        excluded: step.excluded.iter().map(|&index| InstanceIndex(index as u32)).collect(),
    }
}

/// Drives a scheduler through `steps`; the events are in order, each with the number of its step.
fn drive(
    name: PolicyName,
    tpot_target: Option<f64>,
    fleet: &[GeneratedEngine],
    steps: &[GeneratedStep],
) -> Vec<SchedulerEvent> {
    let settings = SchedulerOptions { tpot_target, ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(name.build(&settings), settings);
    scheduler.set_cluster(0.0, Arc::new(cluster(fleet)));
    for (ix, engine) in (0..).map(InstanceIndex).zip(fleet) {
        scheduler.set_available(ix, engine.available);
        if let Some((waiting, used_tokens)) = engine.reported {
            let reported =
                ReportedLoad { waiting, used_tokens, capacity_tokens: 200_000, ..ReportedLoad::default() };
            scheduler.report(0.0, ix, reported);
        }
    }
    let mut events = Vec::new();
    for (number, step) in (0_u64..).zip(steps) {
        let now = number as f64 * 11.0;
        for earlier in 0..number.min(64) {
            match step.ends >> earlier & 3 {
                0 => scheduler.ended(now, AttemptId(number - 1 - earlier)),
                1 => scheduler.first_token(now, AttemptId(number - 1 - earlier), None),
                _ => {}
            }
        }
        scheduler.submit(now, AttemptId(number), schedule_request(step, fleet.len()));
        scheduler.poll(now, step.entropy, &mut events);
    }
    events
}

proptest! {
    /// The same calls give the same results, and an engine gets only requests that it may get: available, of the right
    /// role and model, able to pair, not excluded.
    #[test]
    fn every_policy_is_deterministic_and_uses_eligible_engines(
        fleet in prop::collection::vec(engine(), 1..ENGINES),
        steps in prop::collection::vec(step(), 1..25),
        tpot_target in prop::option::of(0.01..0.2),
    ) {
        let cluster = cluster(&fleet);
        for name in PolicyName::ALL {
            let events = drive(name, tpot_target, &fleet, &steps);
            prop_assert_eq!(&events, &drive(name, tpot_target, &fleet, &steps));
            for event in events {
                let SchedulerEvent::Send { attempt, decision } = event else { continue };
                let excluded = &steps[attempt.0 as usize].excluded;
                let usable = |ix: InstanceIndex, role: InstanceRole| {
                    let engine = &fleet[ix.as_usize()];
                    engine.available && engine.model == 0 && engine.role == role && !excluded.contains(&ix.as_usize())
                };
                match decision.route {
                    EngineRoute::Single { worker, rank } => {
                        let is_local = usable(worker, InstanceRole::Decode)
                            && cluster.get(worker).unwrap().local_prefill
                            && tpot_target.is_some();
                        prop_assert!(usable(worker, InstanceRole::Plain) || is_local, "{name}");
                        prop_assert_eq!(rank, cluster.get(worker).unwrap().rank);
                    }
                    EngineRoute::Pair { prefill, decode, prefill_rank, decode_rank } => {
                        prop_assert!(usable(prefill, InstanceRole::Prefill) && usable(decode, InstanceRole::Decode), "{name}");
                        prop_assert_eq!(fleet[prefill.as_usize()].domain, fleet[decode.as_usize()].domain);
                        prop_assert_eq!(prefill_rank, cluster.get(prefill).unwrap().rank);
                        prop_assert_eq!(decode_rank, cluster.get(decode).unwrap().rank);
                    }
                }
                prop_assert!(decision.explanation.candidates.iter().any(|c| c.instance == decision.route.prefill_instance()));
                prop_assert!(decision.explanation.candidates.iter().all(|c| c.cost.is_finite()));
            }
        }
    }
}
