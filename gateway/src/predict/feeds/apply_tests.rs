use mooncake_wire::events::{
    BlockHash, EngineEventFormat, OutgoingBlocks, OutgoingEngineEvent, encode_engine_batch,
};
use moongate_block_hash::BlockHashChain;
use moongate_discovery::{EngineBlockHashing, EngineFacts, EngineKind};
use moongate_scheduler::index::IndexLookup;

use super::*;
use crate::kv_index::{BlockExtraKeys, EngineSlots, KvIndex};

/// A recorded batch of SGLang: one block of 32 tokens stored in device memory, its hash -694835627279051526.
const STORED: &str = include_str!("testdata/sglang-stored.hex");
const HASH: i64 = -694_835_627_279_051_526;

fn bytes(hex: &str) -> Vec<u8> {
    let hex = hex.trim();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// An engine with some ranks, and the keyspace of its blocks.
struct TestEngine {
    index: Arc<KvIndex>,
    slots: RankSlots,
    keyspace: Arc<BlockKeyspace>,
}

impl TestEngine {
    fn new(ranks: u32) -> Self {
        let facts = EngineFacts {
            models: vec!["tiny".to_owned()],
            page_size: Some(32),
            hashing: Some(EngineBlockHashing::Sglang {
                namespaced: None,
                bigrams: false,
                namespaced_events: false,
            }),
            ..EngineFacts::unreported(EngineKind::Sglang)
        };
        let index = KvIndex::new(100);
        let slots = EngineSlots::new(index.clone()).of_ranks(ranks);
        Self { index, slots, keyspace: Arc::new(BlockKeyspace::from_facts(&facts).unwrap()) }
    }

    fn applier(&self, number: u32, first_number: u32) -> Option<EngineEventApplier> {
        EngineEventApplier::new(self.slots.clone(), number, first_number, self.keyspace.clone())
    }

    /// Number of blocks with these hashes, from the first on, that each rank has.
    fn hits(&self, hashes: &[u64]) -> Vec<u32> {
        let mut hits = IndexLookup::default();
        let keys: Vec<u64> = hashes.iter().map(|hash| self.keyspace.namespace().key(*hash)).collect();
        self.index.lookup(&keys, &mut hits);
        self.slots.iter().map(|slot| hits.engine(slot.slot()).l1).collect()
    }
}

/// A batch of a rank.
fn batch(number: u32, event: OutgoingEngineEvent<'_>) -> Vec<u8> {
    let mut payload = Vec::new();
    encode_engine_batch(EngineEventFormat::Sglang, 0.0, &[event], number, &mut payload);
    payload
}

fn stored<'a>(hashes: &'a [BlockHash<'a>]) -> OutgoingEngineEvent<'a> {
    stored_after(None, hashes, &[], StorageMedium::Gpu)
}

fn stored_after<'a>(
    parent: Option<BlockHash<'a>>,
    hashes: &'a [BlockHash<'a>],
    tokens: &'a [u32],
    medium: StorageMedium<'a>,
) -> OutgoingEngineEvent<'a> {
    OutgoingEngineEvent::Stored(OutgoingBlocks {
        hashes,
        parent,
        tokens,
        block_size: 32,
        medium,
        cache_salt: None,
        extra_keys: None,
    })
}

#[test]
fn a_recorded_event_makes_a_hit_and_a_restart_ends_it() {
    let engine = TestEngine::new(1);
    let mut applier = engine.applier(0, 0).unwrap();
    let confirmed = AppliedEvents { hash_rule: Some(HashRuleStatus::Confirmed), ..AppliedEvents::default() };
    assert_eq!(applier.apply(&bytes(STORED)).unwrap(), confirmed);
    let hash = HASH.cast_unsigned();
    assert_eq!(engine.hits(&[hash]), [1]);
    applier.restarted();
    assert_eq!(engine.hits(&[hash]), [0]);
    assert!(applier.apply(b"garbage").is_err());
}

#[test]
fn each_rank_stores_evicts_and_clears_its_own_blocks() {
    let engine = TestEngine::new(2);
    let mut sources = [0, 1].map(|number| engine.applier(number, 0).unwrap());
    let hashes = [BlockHash::Int(1), BlockHash::Int(2)];
    for (number, source) in (0..).zip(&mut sources) {
        source.apply(&batch(number, stored(&hashes))).unwrap();
    }
    assert_eq!(engine.hits(&[1, 2]), [2, 2]);
    let evicted = OutgoingEngineEvent::Removed { hashes: &hashes[1..], medium: StorageMedium::Gpu };
    sources[1].apply(&batch(1, evicted)).unwrap();
    assert_eq!(engine.hits(&[1, 2]), [2, 1]);
    sources[0].apply(&batch(0, OutgoingEngineEvent::Cleared)).unwrap();
    assert_eq!(engine.hits(&[1, 2]), [0, 1]);
    sources[0].apply(&batch(0, stored(&hashes))).unwrap();
    sources[1].restarted();
    assert_eq!(engine.hits(&[1, 2]), [2, 0]);
}

#[test]
fn checkpoints_are_in_the_last_window_until_their_eviction() {
    let engine = TestEngine::new(1);
    let mut applier =
        engine.applier(0, 0).unwrap().with_checkpoints(Some(PrefixCheckpoints::RequestEndsAndBranches));
    let checkpoints = || {
        let namespace = engine.keyspace.namespace().in_group(1);
        let keys: Vec<u64> = (1..=9).map(|hash| namespace.key(hash)).collect();
        let holders = engine.index.holders(&keys);
        (1..=9).filter(|hash| holders.has(engine.slots[0].slot(), hash - 1)).collect::<Vec<usize>>()
    };
    let hashes = [1, 2, 3, 4, 5, 6, 7, 8, 9].map(BlockHash::Int);
    applier.apply(&batch(0, stored(&hashes[..5]))).unwrap();
    assert_eq!(checkpoints(), [5]);
    assert_eq!(engine.slots[0].groups().of_hybrid().len(), 2);
    // Another request branches off after the second block, with no more blocks than every window has.
    let OutgoingEngineEvent::Stored(blocks) = stored(&hashes[5..]) else { panic!() };
    let branch = OutgoingBlocks { parent: Some(hashes[1]), ..blocks };
    applier.apply(&batch(0, OutgoingEngineEvent::Stored(branch))).unwrap();
    assert_eq!(checkpoints(), [2, 5, 6, 7, 8, 9]);
    let evicted = OutgoingEngineEvent::Removed { hashes: &hashes[4..6], medium: StorageMedium::Gpu };
    applier.apply(&batch(0, evicted)).unwrap();
    assert_eq!(checkpoints(), [2, 7, 8, 9]);
    applier.apply(&batch(0, OutgoingEngineEvent::Cleared)).unwrap();
    assert!(checkpoints().is_empty());
    assert_eq!(engine.hits(&[1, 2]), [0]);
}

#[test]
fn ranks_on_one_socket_are_told_apart_by_their_number() {
    let engine = TestEngine::new(3);
    let mut source = engine.applier(8, 8).unwrap();
    let hashes = [BlockHash::Int(1)];
    for number in [9, 10] {
        source.apply(&batch(number, stored(&hashes))).unwrap();
    }
    assert_eq!(engine.hits(&[1]), [0, 1, 1]);
    // A number that the engine does not have: the source's own rank.
    source.apply(&batch(2, stored(&hashes))).unwrap();
    assert_eq!(engine.hits(&[1]), [1, 1, 1]);
    source.restarted();
    assert_eq!(engine.hits(&[1]), [0, 0, 0]);
    assert!(engine.applier(11, 8).is_none() && engine.applier(7, 8).is_none());
    // An engine with one rank may have any number in a deployment.
    let mut single = TestEngine::new(1).applier(5, 5).unwrap();
    single.apply(&batch(5, stored(&hashes))).unwrap();
}

#[test]
fn blocks_with_unknown_hashes_are_indexed_by_tokens() {
    let engine = TestEngine::new(1);
    let mut source = engine.applier(0, 0).unwrap();
    let tokens: Vec<u32> = (0..96).collect();
    let scheme = engine.keyspace.schemes(&BlockExtraKeys::default()).unwrap().events;
    let mut blocks = Vec::new();
    BlockHashChain::new(scheme).extend(&tokens, &mut blocks);
    let own: Vec<u64> = blocks.iter().map(|block| block.event_hash).collect();
    let theirs = [10, 11, 12].map(BlockHash::Int);
    let mut apply = |event| source.apply(&batch(0, event)).unwrap();

    let unknown = AppliedEvents {
        hash_rule: Some(HashRuleStatus::Different { actual: None }),
        ..AppliedEvents::default()
    };
    assert_eq!(apply(stored_after(None, &theirs[..2], &tokens[..64], StorageMedium::Gpu)), unknown);
    assert_eq!(engine.hits(&own), [2]);
    assert_eq!(engine.hits(&[10, 11]), [0], "the engine's own hashes are not indexed");
    apply(stored_after(Some(BlockHash::Int(11)), &theirs[2..], &tokens[64..], StorageMedium::Gpu));
    assert_eq!(engine.hits(&own), [3]);
    // A block whose parent is unknown could be anywhere.
    apply(stored_after(Some(BlockHash::Int(99)), &[BlockHash::Int(13)], &tokens[..32], StorageMedium::Gpu));

    // The copy in host memory comes without tokens, and stays.
    apply(stored_after(Some(BlockHash::Int(11)), &theirs[2..], &[], StorageMedium::Cpu));
    apply(OutgoingEngineEvent::Removed { hashes: &theirs[1..], medium: StorageMedium::Gpu });
    assert_eq!(engine.hits(&own), [1]);
    apply(stored_after(Some(BlockHash::Int(10)), &theirs[1..2], &tokens[32..64], StorageMedium::Gpu));
    assert_eq!(engine.hits(&own), [2]);
    apply(stored_after(Some(BlockHash::Int(11)), &theirs[2..], &[], StorageMedium::Gpu));
    assert_eq!(engine.hits(&own), [3], "its tokens are known from the copy");
    apply(OutgoingEngineEvent::Cleared);
    assert_eq!(engine.hits(&own), [0]);
    apply(stored_after(Some(BlockHash::Int(11)), &theirs[2..], &[], StorageMedium::Gpu));
    assert_eq!(engine.hits(&own[2..]), [0], "nothing is left of it");
}
