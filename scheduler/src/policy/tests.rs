//! Properties that hold for every policy, and what distinguishes them.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::cache_rules::CacheRules;
use crate::cluster::{ModelIx, PairingDomain, Place, Reported};
use crate::service::ServiceModel;

fn instance(role: Role, domain: u32, models: &[u32]) -> Instance {
    Instance {
        name: "engine".into(),
        role,
        models: models.iter().copied().map(ModelIx).collect(),
        domain: PairingDomain(domain),
        dp_size: 1,
        place: Place::default(),
        cache: CacheRules::default(),
    }
}

fn request() -> Request {
    Request {
        model: ModelIx(0),
        input_tokens: 1000,
        output_tokens: 100,
        sequences: 1,
        priority: 0,
        session: None,
        tenant: None,
        ttft_target: None,
    }
}

fn open() -> Load {
    Load { available: true, ..Load::default() }
}

fn decide(
    name: PolicyName,
    cluster: &Cluster,
    loads: &[Load],
    sequence: u64,
    entropy: u64,
) -> Result<Decision, Refusal> {
    let prediction = Prediction::default();
    let request = request();
    let verdict = name.build(&Settings::default()).decide(&Input {
        request: &request,
        cluster,
        loads,
        prediction: &prediction,
        mix: &ServiceMix::default(),
        now: 0.0,
        arrived: 0.0,
        sequence,
        entropy,
    });
    match verdict? {
        Verdict::Send(decision) => Ok(decision),
        Verdict::Hold { .. } => panic!("{name} holds"),
    }
}

fn any_role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Prefill), Just(Role::Decode), Just(Role::Plain)]
}

proptest! {
    /// Whatever the fleet: a decision names available engines of the right role, model and domain, it is repeatable, and
    /// a refusal comes only when there is no such route.
    #[test]
    fn routes_are_valid_and_repeatable(
        fleet in prop::collection::vec((any_role(), 0_u32..2, 0_u32..2, any::<bool>(), 0_u64..1000), 0..12),
        sequence in any::<u64>(),
        entropy in any::<u64>(),
    ) {
        let cluster = Cluster::new(fleet.iter().map(|f| instance(f.0, f.1, &[f.2])).collect());
        let loads: Vec<Load> = fleet
            .iter()
            .map(|f| Load { available: f.3, pending_prefill_tokens: f.4, ..Load::default() })
            .collect();
        let usable = |i: usize, role: Role| fleet[i].0 == role && fleet[i].2 == 0 && fleet[i].3;
        let possible = (0..fleet.len()).any(|i| usable(i, Role::Plain)
            || usable(i, Role::Prefill) && (0..fleet.len()).any(|j| usable(j, Role::Decode) && fleet[i].1 == fleet[j].1));
        for name in PolicyName::ALL {
            let decision = decide(name, &cluster, &loads, sequence, entropy);
            prop_assert_eq!(&decision, &decide(name, &cluster, &loads, sequence, entropy));
            prop_assert_eq!(decision.is_ok(), possible, "{}: {:?}", name, decision);
            let Ok(decision) = decision else { continue };
            match decision.route {
                Route::Single { worker } => prop_assert!(usable(worker.at(), Role::Plain)),
                Route::Pair { prefill, decode, .. } => {
                    prop_assert!(usable(prefill.at(), Role::Prefill) && usable(decode.at(), Role::Decode));
                    prop_assert_eq!(fleet[prefill.at()].1, fleet[decode.at()].1);
                }
            }
            prop_assert!(decision.explanation.candidates.iter().any(|c| c.instance == decision.route.entry()));
        }
    }

    /// Ranks stay inside the engines' own counts.
    #[test]
    fn ranks_are_in_range(prefill_dp in 1_u32..9, decode_dp in 1_u32..9, sequence in any::<u64>()) {
        let mut prefill = instance(Role::Prefill, 0, &[0]);
        prefill.dp_size = prefill_dp;
        let mut decode = instance(Role::Decode, 0, &[0]);
        decode.dp_size = decode_dp;
        let cluster = Cluster::new(vec![prefill, decode]);
        let decision = decide(PolicyName::RoundRobin, &cluster, &[open(); 2], sequence, 0).unwrap();
        let Route::Pair { prefill_rank, decode_rank, .. } = decision.route else { panic!("a pair") };
        prop_assert!(prefill_rank < prefill_dp && decode_rank < decode_dp);
    }
}

fn pairs_fleet() -> Cluster {
    Cluster::new(vec![
        instance(Role::Prefill, 0, &[0]),
        instance(Role::Prefill, 0, &[0]),
        instance(Role::Decode, 0, &[0]),
        instance(Role::Decode, 0, &[0]),
    ])
}

#[test]
fn round_robin_uses_every_pair_equally() {
    let cluster = pairs_fleet();
    let mut seen: HashMap<(InstanceIx, InstanceIx), u32> = HashMap::new();
    for sequence in 0..400 {
        let route = decide(PolicyName::RoundRobin, &cluster, &[open(); 4], sequence, 0).unwrap().route;
        *seen.entry((route.entry(), route.exit())).or_default() += 1;
    }
    assert_eq!(seen.len(), 4);
    assert!(seen.values().all(|&times| times == 100), "{seen:?}");
}

#[test]
fn least_load_counts_tokens_not_requests() {
    let cluster = pairs_fleet();
    let mut loads = [open(); 4];
    loads[0] = Load { in_flight: 1, pending_prefill_tokens: 100_000, ..open() };
    loads[1] = Load { in_flight: 20, pending_prefill_tokens: 400, ..open() };
    loads[2] = Load { in_flight: 2, active_decode_tokens: 50_000, ..open() };
    let decision = decide(PolicyName::LeastLoad, &cluster, &loads, 0, 7).unwrap();
    assert_eq!((decision.route.entry(), decision.route.exit()), (InstanceIx(1), InstanceIx(3)));
}

#[test]
fn least_load_believes_the_engine_about_other_gateways() {
    let cluster = pairs_fleet();
    let mut loads = [open(); 4];
    loads[0].reported = Some(Reported { waiting_uncached_tokens: 9000, ..Reported::default() });
    for entropy in 0..32 {
        let decision = decide(PolicyName::LeastLoad, &cluster, &loads, 0, entropy).unwrap();
        assert_eq!(decision.route.entry(), InstanceIx(1));
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of decisions take minutes")]
fn ties_are_spread() {
    let cluster = Cluster::new(vec![instance(Role::Plain, 0, &[0]); 4]);
    let mut seen = [0_u32; 4];
    for step in 0..4000_u64 {
        let entropy = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        seen[decide(PolicyName::LeastLoad, &cluster, &[open(); 4], 0, entropy)
            .unwrap()
            .route
            .entry()
            .at()] += 1;
    }
    assert!(seen.iter().all(|&times| (800..1200).contains(&times)), "{seen:?}");
}

#[test]
#[cfg_attr(miri, ignore = "thousands of decisions take minutes")]
fn power_of_two_never_takes_the_worst_of_many() {
    let cluster = Cluster::new(vec![instance(Role::Plain, 0, &[0]); 5]);
    let mut loads = [open(); 5];
    loads[3].pending_prefill_tokens = 1_000_000;
    for step in 0..2000_u64 {
        let entropy = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let decision = decide(PolicyName::PowerOfTwo, &cluster, &loads, 0, entropy).unwrap();
        assert_ne!(decision.route.entry(), InstanceIx(3));
        assert_eq!(decision.explanation.candidates.len(), 2);
    }
}

#[test]
fn refusals_tell_unknown_from_unavailable() {
    let cluster = pairs_fleet();
    let refused = decide(PolicyName::LeastLoad, &cluster, &[Load::default(); 4], 0, 0);
    assert_eq!(refused, Err(Refusal::NoneAvailable { entries: 2, decodes: 2 }));
    let other = Cluster::new(vec![instance(Role::Plain, 0, &[1])]);
    assert_eq!(decide(PolicyName::LeastLoad, &other, &[open()], 0, 0), Err(Refusal::UnknownModel));
}

#[test]
fn names_parse_back() {
    for name in PolicyName::ALL {
        assert_eq!(name.as_str().parse::<PolicyName>(), Ok(name));
        assert_eq!(name.build(&Settings::default()).name(), name);
    }
    let error = "fastest".parse::<PolicyName>().unwrap_err().to_string();
    assert!(PolicyName::ALL.iter().all(|name| error.contains(name.as_str())), "{error}");
}

#[test]
fn booking_leaves_out_what_is_cached() {
    let cluster = pairs_fleet();
    let request = request();
    let hits = crate::prediction::TierHits { l1_tokens: 600, l2_tokens: 0, l3_tokens: 200 };
    let prediction = Prediction { per_instance: vec![hits; 4], ..Prediction::default() };
    let input = Input {
        request: &request,
        cluster: &cluster,
        loads: &[open(); 4],
        prediction: &prediction,
        mix: &ServiceMix::default(),
        now: 0.0,
        arrived: 0.0,
        sequence: 0,
        entropy: 0,
    };
    let verdict = PolicyName::LeastLoad.build(&Settings::default()).decide(&input).unwrap();
    let Verdict::Send(decision) = verdict else { panic!("held") };
    assert_eq!(decision.booking, Booking { prefill_tokens: 200, decode_tokens: 1100 });
}

/// Also from policies that do not predict: how long the silence of an engine means nothing.
#[test]
fn the_expected_first_token_is_behind_the_queue() {
    let cluster = Cluster::new(vec![instance(Role::Plain, 0, &[0])]);
    let service = ServiceModel { c0: 0.0, a: 0.001, b: 0.0, speed: 2.0 };
    let expected = |name, prefill_wait| {
        let load = Load { prefill_wait, service, ..open() };
        decide(name, &cluster, &[load], 0, 0).unwrap().expected_ttft
    };
    for name in [PolicyName::RoundRobin, PolicyName::LeastLoad, PolicyName::CacheAware] {
        assert!((expected(name, 0.0) - 2.0).abs() < 1e-9, "{name}");
        assert!((expected(name, 30.0) - 32.0).abs() < 1e-9, "{name}");
    }
}
