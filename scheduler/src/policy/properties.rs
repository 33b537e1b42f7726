//! What holds for every policy, whatever it is asked in a row.

use std::sync::Arc;

use proptest::prelude::*;

use super::PolicyName;
use crate::cache_rules::CacheRules;
use crate::cluster::{Cluster, Instance, InstanceIx, ModelIx, PairingDomain, Place, Reported, Role};
use crate::decision::Route;
use crate::prediction::{Prediction, TierHits};
use crate::request::Request;
use crate::scheduler::{Ask, Event, Scheduler, Ticket};
use crate::settings::Settings;

/// Engines at most.
const ENGINES: usize = 10;

#[derive(Debug, Clone)]
struct Engine {
    role: Role,
    domain: u32,
    model: u32,
    available: bool,
    reported: Option<(u32, u64)>,
}

#[derive(Debug, Clone)]
struct Step {
    branch: u64,
    pages: u64,
    hits: Vec<(u32, u32, u32)>,
    barred: Vec<usize>,
    /// How long the previous requests go on: each of them may get its first token, and may end.
    ends: u64,
    entropy: u64,
}

fn engine() -> impl Strategy<Value = Engine> {
    let role = prop_oneof![Just(Role::Prefill), Just(Role::Decode), Just(Role::Plain)];
    let reported = prop::option::of((0_u32..50, 0_u64..200_000));
    (role, 0_u32..2, 0_u32..2, prop::bool::weighted(0.8), reported).prop_map(
        |(role, domain, model, available, reported)| Engine { role, domain, model, available, reported },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let hits = prop::collection::vec((0_u32..2000, 0_u32..2000, 0_u32..2000), ENGINES);
    let barred = prop::collection::vec(0..ENGINES, 0..3);
    (0_u64..4, 1_u64..60, hits, barred, any::<u64>(), any::<u64>()).prop_map(
        |(branch, pages, hits, barred, ends, entropy)| Step { branch, pages, hits, barred, ends, entropy },
    )
}

fn cluster(fleet: &[Engine]) -> Cluster {
    let instance = |(at, engine): (usize, &Engine)| Instance {
        name: format!("engine-{at}").into(),
        role: engine.role,
        models: vec![ModelIx(engine.model)],
        domain: PairingDomain(engine.domain),
        dp_size: 1 + at as u32 % 3,
        place: Place::default(),
        cache: CacheRules::default(),
    };
    Cluster::new(fleet.iter().enumerate().map(instance).collect())
}

fn ask(step: &Step, engines: usize) -> Ask {
    let hits = |&(l1_tokens, l2_tokens, l3_tokens): &_| TierHits { l1_tokens, l2_tokens, l3_tokens };
    // Prompts share their first page.
    let pages = (0..step.pages).map(|at| if at == 0 { 0 } else { step.branch * 1000 + at });
    Ask {
        request: Request {
            model: ModelIx(0),
            input_tokens: step.pages as u32 * 100,
            output_tokens: 100,
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        },
        prediction: Prediction {
            per_instance: step.hits.iter().take(engines).map(hits).collect(),
            farness: Vec::new(),
            shared: Vec::new(),
            pages: pages.collect(),
            page_tokens: 100,
        },
        barred: step.barred.iter().map(|&at| InstanceIx(at as u32)).collect(),
    }
}

/// Drives a scheduler through `steps`; the events are in order, each with the number of its step.
fn drive(name: PolicyName, fleet: &[Engine], steps: &[Step]) -> Vec<Event> {
    let settings = Settings::default();
    let mut scheduler = Scheduler::new(name.build(&settings), settings);
    scheduler.set_cluster(0.0, Arc::new(cluster(fleet)));
    for (ix, engine) in (0..).map(InstanceIx).zip(fleet) {
        scheduler.set_available(ix, engine.available);
        if let Some((waiting, used_tokens)) = engine.reported {
            let reported = Reported { waiting, used_tokens, capacity_tokens: 200_000, ..Reported::default() };
            scheduler.report(0.0, ix, reported);
        }
    }
    let mut events = Vec::new();
    for (number, step) in (0_u64..).zip(steps) {
        let now = number as f64 * 11.0;
        for earlier in 0..number.min(64) {
            match step.ends >> earlier & 3 {
                0 => scheduler.ended(now, Ticket(number - 1 - earlier)),
                1 => scheduler.first_token(now, Ticket(number - 1 - earlier), None),
                _ => {}
            }
        }
        scheduler.submit(now, Ticket(number), ask(step, fleet.len()));
        scheduler.poll(now, step.entropy, &mut events);
    }
    events
}

proptest! {
    /// The same calls give the same answers, and an engine gets only requests that it may get: available, of the right role and
    /// model, able to pair, not barred.
    #[test]
    fn every_policy_is_deterministic_and_keeps_to_the_fleet(
        fleet in prop::collection::vec(engine(), 1..ENGINES),
        steps in prop::collection::vec(step(), 1..25),
    ) {
        let cluster = cluster(&fleet);
        for name in PolicyName::ALL {
            let events = drive(name, &fleet, &steps);
            prop_assert_eq!(&events, &drive(name, &fleet, &steps));
            for event in events {
                let Event::Send { ticket, decision } = event else { continue };
                let barred = &steps[ticket.0 as usize].barred;
                let usable = |ix: InstanceIx, role: Role| {
                    let engine = &fleet[ix.at()];
                    engine.available && engine.model == 0 && engine.role == role && !barred.contains(&ix.at())
                };
                match decision.route {
                    Route::Single { worker } => prop_assert!(usable(worker, Role::Plain), "{name}"),
                    Route::Pair { prefill, decode, prefill_rank, decode_rank } => {
                        prop_assert!(usable(prefill, Role::Prefill) && usable(decode, Role::Decode), "{name}");
                        prop_assert_eq!(fleet[prefill.at()].domain, fleet[decode.at()].domain);
                        prop_assert!(prefill_rank < cluster.get(prefill).unwrap().dp_size);
                        prop_assert!(decode_rank < cluster.get(decode).unwrap().dp_size);
                    }
                }
                prop_assert!(decision.explanation.candidates.iter().any(|c| c.instance == decision.route.entry()));
                prop_assert!(decision.explanation.candidates.iter().all(|c| c.cost.is_finite()));
            }
        }
    }
}
