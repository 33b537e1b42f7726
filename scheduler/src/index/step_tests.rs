//! Lookups in steps, with changes in between.

use proptest::prelude::*;

use super::*;

/// Blocks of a prompt that takes several steps to look up.
const LONG: usize = 300;

proptest! {
    /// Whatever changes between the steps of a lookup, it ends with a possible result, and the next lookup is exact.
    #[test]
    fn everything_may_change_between_steps(
        changes in prop::collection::vec((0..4u8, 0..3usize, 0..LONG, 0..LONG), 0..20),
    ) {
        let prompt: Vec<u64> = (0..LONG as u64).map(|page| BlockHashNamespace::new(&["long"]).key(page)).collect();
        let mut index = KvBlockIndex::new(1_000);
        let engines: Vec<EngineSlot> = (0..3).map(|_| index.add_engine()).collect();
        index.add_engine_blocks(engines[0], EngineCacheTier::L1, &prompt);
        let mut hits = IndexLookup::default();
        hits.restart();
        for (change, engine, first, last) in changes {
            let (engine, pages) = (engines[engine], prompt.get(first..last).unwrap_or_default());
            match change {
                0 | 1 => index.add_engine_blocks(engine, EngineCacheTier::L1, pages),
                2 => index.remove_engine_blocks(engine, EngineCacheTier::L1, pages),
                _ => index.clear_engine_tier(engine, EngineCacheTier::L1),
            }
            if index.lookup_step(&prompt, &mut hits) {
                prop_assert!(engines.iter().all(|&engine| hits.engine(engine).local as usize <= LONG));
                hits.restart();
            }
        }
        let mut whole = IndexLookup::default();
        index.lookup(&prompt, &mut whole);
        for &engine in &engines {
            let has_block = |page: &&u64| {
                let mut alone = IndexLookup::default();
                index.lookup(&[**page], &mut alone);
                alone.engine(engine).l1 == 1
            };
            prop_assert_eq!(whole.engine(engine).l1 as usize, prompt.iter().take_while(has_block).count());
        }
    }
}

/// Columns are reassigned between two steps of a lookup.
#[test]
#[cfg_attr(miri, ignore = "a prompt of 1,000 blocks in 100 engines takes minutes")]
fn a_lookup_in_steps_begins_again_where_it_must() {
    let mut index = KvBlockIndex::new(10_000);
    let prompt: Vec<u64> = (0..1_000).map(|page| BlockHashNamespace::new(&[]).key(page)).collect();
    let engines: Vec<EngineSlot> = (0..3).map(|_| index.add_engine()).collect();
    engines.iter().for_each(|&engine| index.add_engine_blocks(engine, EngineCacheTier::L1, &prompt));
    let mut hits = IndexLookup::default();
    hits.restart();
    assert!(!index.lookup_step(&prompt, &mut hits));
    index.clear_engine_tier(engines[0], EngineCacheTier::L1);
    index.remove_engine(engines[1]);
    index.add_engine_blocks(engines[0], EngineCacheTier::L2, &prompt[..200]);
    let more: Vec<EngineSlot> = (0..100).map(|_| index.add_engine()).collect();
    more.iter().for_each(|&engine| index.add_engine_blocks(engine, EngineCacheTier::L1, &prompt[..100]));
    while !index.lookup_step(&prompt, &mut hits) {}
    let mut whole = IndexLookup::default();
    index.lookup(&prompt, &mut whole);
    assert_eq!((&hits.engines, &hits.shared), (&whole.engines, &whole.shared));
    assert_eq!(hits.engine(engines[0]), EngineHits { l1: 0, local: 200, shared: 0 });
    assert_eq!(hits.engine(engines[2]).l1, 1_000);

    // The lookup ends, however often that happens.
    hits.restart();
    let mut steps = 0;
    while !index.lookup_step(&prompt, &mut hits) {
        index.add_engine_blocks(more[0], EngineCacheTier::L2, &prompt[..10]);
        index.clear_engine_tier(more[0], EngineCacheTier::L2);
        steps += 1;
    }
    assert!(steps < 10, "{steps}");
    assert_eq!(hits.engine(engines[2]).l1, 1_000);
}
