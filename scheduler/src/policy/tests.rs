//! Properties that hold for every policy, and what distinguishes them.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::cache_params::EngineCacheParams;
use crate::fleet::{LocationIds, ModelIndex, PairingDomain, ReportedLoad};
use crate::prefill_time::PrefillTimeModel;

fn instance(role: InstanceRole, domain: u32, models: &[u32]) -> SchedulableInstance {
    SchedulableInstance {
        name: "engine".into(),
        role,
        models: models.iter().copied().map(ModelIndex).collect(),
        loadable: Vec::new(),
        domain: PairingDomain(domain),
        rank: 0,
        location: LocationIds::default(),
        cache: EngineCacheParams::default(),
        local_prefill: false,
    }
}

fn request() -> RequestProfile {
    RequestProfile {
        model: ModelIndex(0),
        input_tokens: 1000,
        max_output_tokens: Some(100),
        sequences: 1,
        priority: 0,
        session: None,
        tenant: None,
        ttft_target: None,
    }
}

fn open() -> InstanceLoad {
    InstanceLoad { available: true, ..InstanceLoad::default() }
}

fn decide(
    name: PolicyName,
    cluster: &SchedulableFleet,
    loads: &[InstanceLoad],
    sequence: u64,
    entropy: u64,
) -> Result<RoutingDecision, ScheduleRejection> {
    decide_predicted(name, cluster, loads, &CacheHitPrediction::default(), (sequence, entropy))
}

fn decide_predicted(
    name: PolicyName,
    cluster: &SchedulableFleet,
    loads: &[InstanceLoad],
    prediction: &CacheHitPrediction,
    (sequence, entropy): (u64, u64),
) -> Result<RoutingDecision, ScheduleRejection> {
    let request = request();
    let verdict = name.build(&SchedulerOptions::default()).decide(&PolicyInput {
        request: &request,
        cluster,
        loads,
        prediction,
        adapters: &AdapterResidencies::default(),
        prefill_times: &PrefillTimeDistribution::default(),
        uncached_share: 1.0,
        expected_output_tokens: 100,
        now: 0.0,
        arrived: 0.0,
        sequence,
        entropy,
        is_explained: true,
        held: None,
    });
    match verdict? {
        PolicyVerdict::Send(decision) => Ok(decision),
        PolicyVerdict::Defer { .. } => panic!("{name} defers"),
    }
}

fn any_role() -> impl Strategy<Value = InstanceRole> {
    prop_oneof![Just(InstanceRole::Prefill), Just(InstanceRole::Decode), Just(InstanceRole::Plain)]
}

proptest! {
    /// For any fleet, a decision names available engines of the right role, model and domain, it is repeatable, and a
    /// rejection occurs only when no such route exists.
    #[test]
    fn routes_are_valid_and_repeatable(
        fleet in prop::collection::vec((any_role(), 0_u32..2, 0_u32..2, any::<bool>(), 0_u64..1000), 0..12),
        sequence in any::<u64>(),
        entropy in any::<u64>(),
    ) {
        let cluster = SchedulableFleet::new(fleet.iter().map(|f| instance(f.0, f.1, &[f.2])).collect());
        let loads: Vec<InstanceLoad> = fleet
            .iter()
            .map(|f| InstanceLoad { available: f.3, pending_prefill_tokens: f.4, ..InstanceLoad::default() })
            .collect();
        let usable = |i: usize, role: InstanceRole| fleet[i].0 == role && fleet[i].2 == 0 && fleet[i].3;
        let possible = (0..fleet.len()).any(|i| usable(i, InstanceRole::Plain)
            || usable(i, InstanceRole::Prefill) && (0..fleet.len()).any(|j| usable(j, InstanceRole::Decode) && fleet[i].1 == fleet[j].1));
        for name in PolicyName::ALL {
            let decision = decide(name, &cluster, &loads, sequence, entropy);
            prop_assert_eq!(&decision, &decide(name, &cluster, &loads, sequence, entropy));
            prop_assert_eq!(decision.is_ok(), possible, "{}: {:?}", name, decision);
            let Ok(decision) = decision else { continue };
            match decision.route {
                EngineRoute::Single { worker, .. } => prop_assert!(usable(worker.as_usize(), InstanceRole::Plain)),
                EngineRoute::Pair { prefill, decode, .. } => {
                    prop_assert!(usable(prefill.as_usize(), InstanceRole::Prefill) && usable(decode.as_usize(), InstanceRole::Decode));
                    prop_assert_eq!(fleet[prefill.as_usize()].1, fleet[decode.as_usize()].1);
                }
            }
            prop_assert!(decision.explanation.candidates.iter().any(|c| c.instance == decision.route.prefill_instance()));
        }
    }

}

/// The instances of an engine's data-parallel ranks.
fn ranks_of(role: InstanceRole, count: u32) -> impl Iterator<Item = SchedulableInstance> {
    (0..count).map(move |rank| SchedulableInstance {
        name: format!("{role:?}#{rank}").into(),
        rank,
        ..instance(role, 0, &[0])
    })
}

#[test]
fn route_has_the_ranks_of_the_chosen_instances() {
    let ranks = ranks_of(InstanceRole::Prefill, 3).chain(ranks_of(InstanceRole::Decode, 2));
    let cluster = SchedulableFleet::new(ranks.collect());
    for sequence in 0..100 {
        let decision = decide(PolicyName::RoundRobin, &cluster, &[open(); 5], sequence, 0).unwrap();
        let EngineRoute::Pair { prefill, prefill_rank, decode, decode_rank } = decision.route else {
            panic!("a pair")
        };
        assert_eq!((prefill.0, decode.0), (prefill_rank, 3 + decode_rank));
    }
    let workers = SchedulableFleet::new(ranks_of(InstanceRole::Plain, 2).collect());
    let decision = decide(PolicyName::RoundRobin, &workers, &[open(); 2], 1, 0).unwrap();
    assert_eq!(decision.route, EngineRoute::Single { worker: InstanceIndex(1), rank: 1 });
}

#[test]
fn request_goes_to_the_rank_that_has_its_prompt() {
    let cluster = SchedulableFleet::new(ranks_of(InstanceRole::Plain, 3).collect());
    let hit = crate::prediction::TierHits { l1_tokens: 960, ..Default::default() };
    for rank in 0..3 {
        let mut prediction =
            CacheHitPrediction { per_instance: vec![Default::default(); 3], ..Default::default() };
        prediction.per_instance[rank as usize] = hit;
        for sequence in 0..4 {
            let decided =
                decide_predicted(PolicyName::Predictive, &cluster, &[open(); 3], &prediction, (sequence, 7));
            let expected = EngineRoute::Single { worker: InstanceIndex(rank), rank };
            assert_eq!(decided.unwrap().route, expected);
        }
    }
}

fn pairs_fleet() -> SchedulableFleet {
    SchedulableFleet::new(vec![
        instance(InstanceRole::Prefill, 0, &[0]),
        instance(InstanceRole::Prefill, 0, &[0]),
        instance(InstanceRole::Decode, 0, &[0]),
        instance(InstanceRole::Decode, 0, &[0]),
    ])
}

#[test]
fn round_robin_uses_every_pair_equally() {
    let cluster = pairs_fleet();
    let mut counts: HashMap<(InstanceIndex, InstanceIndex), u32> = HashMap::new();
    for sequence in 0..400 {
        let route = decide(PolicyName::RoundRobin, &cluster, &[open(); 4], sequence, 0).unwrap().route;
        *counts.entry((route.prefill_instance(), route.decode_instance())).or_default() += 1;
    }
    assert_eq!(counts.len(), 4);
    assert!(counts.values().all(|&times| times == 100), "{counts:?}");
}

#[test]
fn least_load_counts_tokens_not_requests() {
    let cluster = pairs_fleet();
    let mut loads = [open(); 4];
    loads[0] = InstanceLoad { in_flight: 1, pending_prefill_tokens: 100_000, ..open() };
    loads[1] = InstanceLoad { in_flight: 20, pending_prefill_tokens: 400, ..open() };
    loads[2] = InstanceLoad { in_flight: 2, active_decode_tokens: 50_000, ..open() };
    let decision = decide(PolicyName::LeastLoad, &cluster, &loads, 0, 7).unwrap();
    assert_eq!(
        (decision.route.prefill_instance(), decision.route.decode_instance()),
        (InstanceIndex(1), InstanceIndex(3))
    );
}

#[test]
fn least_load_includes_reported_load_of_other_gateways() {
    let cluster = pairs_fleet();
    let mut loads = [open(); 4];
    loads[0].reported = Some(ReportedLoad { waiting_uncached_tokens: 9000, ..ReportedLoad::default() });
    for entropy in 0..32 {
        let decision = decide(PolicyName::LeastLoad, &cluster, &loads, 0, entropy).unwrap();
        assert_eq!(decision.route.prefill_instance(), InstanceIndex(1));
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of decisions take minutes")]
fn ties_are_spread() {
    let cluster = SchedulableFleet::new(vec![instance(InstanceRole::Plain, 0, &[0]); 4]);
    let mut counts = [0_u32; 4];
    for step in 0..4000_u64 {
        let entropy = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        counts[decide(PolicyName::LeastLoad, &cluster, &[open(); 4], 0, entropy)
            .unwrap()
            .route
            .prefill_instance()
            .as_usize()] += 1;
    }
    assert!(counts.iter().all(|&times| (800..1200).contains(&times)), "{counts:?}");
}

#[test]
#[cfg_attr(miri, ignore = "thousands of decisions take minutes")]
fn power_of_two_never_takes_the_worst_of_many() {
    let cluster = SchedulableFleet::new(vec![instance(InstanceRole::Plain, 0, &[0]); 5]);
    let mut loads = [open(); 5];
    loads[3].pending_prefill_tokens = 1_000_000;
    for step in 0..2000_u64 {
        let entropy = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let decision = decide(PolicyName::PowerOfTwo, &cluster, &loads, 0, entropy).unwrap();
        assert_ne!(decision.route.prefill_instance(), InstanceIndex(3));
        assert_eq!(decision.explanation.candidates.len(), 2);
    }
}

#[test]
fn rejections_distinguish_unknown_from_unavailable() {
    let cluster = pairs_fleet();
    let refused = decide(PolicyName::LeastLoad, &cluster, &[InstanceLoad::default(); 4], 0, 0);
    assert_eq!(refused, Err(ScheduleRejection::NoneAvailable { prefills: 2, decodes: 2 }));
    let other = SchedulableFleet::new(vec![instance(InstanceRole::Plain, 0, &[1])]);
    assert_eq!(decide(PolicyName::LeastLoad, &other, &[open()], 0, 0), Err(ScheduleRejection::UnknownModel));
}

#[test]
fn names_parse_back() {
    for name in PolicyName::ALL {
        assert_eq!(name.as_str().parse::<PolicyName>(), Ok(name));
        assert_eq!(name.build(&SchedulerOptions::default()).name(), name);
    }
    let error = "fastest".parse::<PolicyName>().unwrap_err().to_string();
    assert!(PolicyName::ALL.iter().all(|name| error.contains(name.as_str())), "{error}");
}

#[test]
fn reservation_excludes_cached_tokens() {
    let cluster = pairs_fleet();
    let request = request();
    let hits = crate::prediction::TierHits { l1_tokens: 600, l3_tokens: 200, ..Default::default() };
    let prediction = CacheHitPrediction { per_instance: vec![hits; 4], ..CacheHitPrediction::default() };
    let input = PolicyInput {
        request: &request,
        cluster: &cluster,
        loads: &[open(); 4],
        prediction: &prediction,
        adapters: &AdapterResidencies::default(),
        prefill_times: &PrefillTimeDistribution::default(),
        uncached_share: 1.0,
        expected_output_tokens: 100,
        now: 0.0,
        arrived: 0.0,
        sequence: 0,
        entropy: 0,
        is_explained: true,
        held: None,
    };
    let verdict = PolicyName::LeastLoad.build(&SchedulerOptions::default()).decide(&input).unwrap();
    let PolicyVerdict::Send(decision) = verdict else { panic!("deferred") };
    assert_eq!(decision.reservation, LoadReservation { prefill_tokens: 200, decode_tokens: 1100 });
}

/// Policies without predictions also return an expected time, below which an engine's inactivity is normal.
#[test]
fn expected_ttft_includes_the_queue() {
    let cluster = SchedulableFleet::new(vec![instance(InstanceRole::Plain, 0, &[0])]);
    let service = PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 2.0 };
    let expected = |name, prefill_wait| {
        let load = InstanceLoad { prefill_wait, service, ..open() };
        decide(name, &cluster, &[load], 0, 0).unwrap().expected_ttft
    };
    for name in [PolicyName::RoundRobin, PolicyName::LeastLoad, PolicyName::CacheAware] {
        assert!((expected(name, 0.0) - 2.0).abs() < 1e-9, "{name}");
        assert!((expected(name, 30.0) - 32.0).abs() < 1e-9, "{name}");
    }
}
