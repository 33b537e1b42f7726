use mooncake_wire::events::{
    BlockHash, EngineEvent, EngineEventBatch, EngineEventFormat, OutgoingBlocks, OutgoingEngineEvent,
    encode_engine_batch,
};
use moongate_discovery::{EngineBlockHashing, EngineFacts, EngineKind, VllmHashAlgorithm};

use super::*;

const CHUNK: u32 = 4;

fn keyspace() -> BlockKeyspace {
    let facts = EngineFacts {
        models: vec!["m".to_owned()],
        page_size: Some(2),
        hashing: Some(EngineBlockHashing::Vllm {
            algorithm: VllmHashAlgorithm::Sha256Cbor,
            seed: "7".to_owned(),
        }),
        ..EngineFacts::unreported(EngineKind::Vllm)
    };
    BlockKeyspace::from_facts(&facts).unwrap()
}

/// Hashes of the chunks of a prompt.
fn hashes(scheme: HashScheme, tokens: &[u32]) -> Vec<u64> {
    let mut chunks = Vec::new();
    BlockHashChain::new(scheme).extend(tokens, &mut chunks);
    chunks.iter().map(|chunk| chunk.event_hash).collect()
}

/// Reads an event about one block.
fn read(
    rule: &EngineChunkRule,
    medium: StorageMedium<'_>,
    hash: u64,
    parent: Option<u64>,
    tokens: &[u32],
) -> ReadChunk {
    let mut payload = Vec::new();
    let stored = OutgoingEngineEvent::Stored(OutgoingBlocks {
        hashes: &[BlockHash::Int(hash)],
        parent: parent.map(BlockHash::Int),
        tokens,
        block_size: u32::try_from(tokens.len()).unwrap().min(CHUNK),
        medium,
        cache_salt: None,
        extra_keys: None,
    });
    encode_engine_batch(EngineEventFormat::Vllm, 0.0, &[stored], 0, &mut payload);
    let batch = EngineEventBatch::decode(&payload).unwrap();
    let Ok(EngineEvent::Stored(stored)) = batch.events().next().unwrap() else { panic!("no stored event") };
    rule.read(&keyspace(), &stored)
}

fn chunk(rule: &EngineChunkRule, hash: u64, tokens: &[u32]) -> Option<ChunkRuleStatus> {
    let read = read(rule, StorageMedium::StoreMemory, hash, None, tokens);
    assert!(read.is_chunk);
    read.status
}

#[test]
fn sha256_cbor_is_known_from_the_first_chunk() {
    let rule = EngineChunkRule::default();
    assert!(!rule.has_chunks());
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    let root = HashScheme::lmcache_root_of_vllm("7");
    let found = hashes(HashScheme::lmcache_sha256_cbor(CHUNK, root).unwrap(), &tokens);
    assert!(chunk(&rule, found[0], &tokens[..5]).is_some(), "with a token of the next chunk");
    let known = rule.known().unwrap();
    assert_eq!(known.to_string(), "chunks of 4 tokens (sha256_cbor)");
    let namespace = ChunkHashRule::namespace(&keyspace());
    let keys: Vec<u64> = found.iter().map(|hash| namespace.key(*hash)).collect();
    assert_eq!(known.keys(&keyspace(), &[&tokens[..], &[9]].concat()), keys, "full chunks only");
    rule.clear();
    assert_eq!(rule.status(), ChunkRuleStatus::NoChunks);
}

#[test]
fn builtin_is_known_after_two_prompts_with_the_same_root() {
    let rule = EngineChunkRule::default();
    let scheme = HashScheme::lmcache_builtin_after(CHUNK, -123_456_789).unwrap();
    let first = [[1, 2, 3, 4], [5, 6, 7, 8]];
    let found = first.map(|tokens| hashes(scheme.clone(), &tokens)[0]);
    assert_eq!(chunk(&rule, found[0], &first[0]), Some(ChunkRuleStatus::Learning));
    assert_eq!(rule.known(), None);
    assert!(chunk(&rule, found[1], &first[1]).is_some());
    assert_eq!(rule.known().unwrap().to_string(), "chunks of 4 tokens (builtin)");
    assert_eq!(hashes(rule.known().unwrap().scheme().unwrap(), &first[0]), [found[0]]);
}

#[test]
fn large_blocks_of_a_store_are_no_chunks() {
    let rule = EngineChunkRule::default();
    let own = own_hash(&keyspace(), &[1, 2, 3, 4]).unwrap();
    let read = |hash, parent| read(&rule, StorageMedium::StoreMemory, hash, parent, &[1, 2, 3, 4]);
    assert_eq!(read(own, None), ReadChunk { is_chunk: false, status: None });
    assert!(!read(7, Some(own)).is_chunk);
    assert_eq!(rule.status(), ChunkRuleStatus::NoChunks);
}

#[test]
fn an_unknown_rule_is_recognized_after_some_prompts() {
    let rule = EngineChunkRule::default();
    let changes: Vec<_> =
        (0..MAX_TRIALS).filter_map(|n| chunk(&rule, u64::from(n) << 7, &[n, 2, 3, 4])).collect();
    assert_eq!(changes, [ChunkRuleStatus::Learning, ChunkRuleStatus::Unknown]);
}

#[test]
fn blocks_of_the_engine_and_of_a_store_are_no_chunks() {
    let rule = EngineChunkRule::default();
    assert!(!read(&rule, StorageMedium::Gpu, 7, None, &[1, 2, 3, 4]).is_chunk);
    assert!(!read(&rule, StorageMedium::StoreMemory, 7, None, &[1, 2]).is_chunk);
    assert!(!read(&rule, StorageMedium::StoreMemory, 7, None, &[1, 2, 3]).is_chunk);
    assert!(!rule.has_chunks());
    // LMCache names 0 as the parent of a later chunk that it stores first.
    assert!(read(&rule, StorageMedium::StoreMemory, 7, Some(0), &[1, 2, 3, 4]).is_chunk);
    assert_eq!(rule.status(), ChunkRuleStatus::Learning);
}
