//! Cost of hashing a prompt's blocks.
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use moongate_block_hash::{
    BlockHashChain, DEFAULT_VLLM_SEED, HashScheme, LMCACHE_CHUNK_TOKENS, SglangNamespace, VllmExtraKeys,
};

const PROMPT_TOKENS: u32 = 131_072;

fn prompt() -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|position| position.wrapping_mul(2_654_435_761) % 151_936).collect()
}

fn whole_prompts(criterion: &mut Criterion) {
    let tokens = prompt();
    let (namespace, extra, seed) = (SglangNamespace::default(), VllmExtraKeys::default(), DEFAULT_VLLM_SEED);
    let mut group = criterion.benchmark_group("131072 tokens");
    group.throughput(Throughput::Elements(u64::from(PROMPT_TOKENS)));
    for (name, scheme) in [
        ("sglang page 64", HashScheme::sglang(64, namespace)),
        ("sglang page 16", HashScheme::sglang(16, namespace)),
        ("sglang page 1", HashScheme::sglang(1, namespace)),
        ("vllm sha256_cbor page 64", HashScheme::vllm_sha256_cbor(64, seed, extra)),
        ("vllm sha256_cbor page 16", HashScheme::vllm_sha256_cbor(16, seed, extra)),
        ("vllm sha256 page 16", HashScheme::vllm_sha256(16, seed, extra)),
        ("lmcache sha256_cbor", HashScheme::lmcache_sha256_cbor(LMCACHE_CHUNK_TOKENS, 0)),
        ("lmcache builtin", HashScheme::lmcache_builtin(LMCACHE_CHUNK_TOKENS, 0)),
    ] {
        let start = BlockHashChain::new(scheme.unwrap());
        let mut blocks = Vec::new();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                blocks.clear();
                start.clone().extend(black_box(&tokens), &mut blocks);
                blocks.len()
            });
        });
    }
    group.finish();
}

fn follow_up(criterion: &mut Criterion) {
    let tokens = prompt();
    let mut known = BlockHashChain::new(HashScheme::sglang(64, SglangNamespace::default()).unwrap());
    known.extend(&tokens[..tokens.len() - 1024], &mut Vec::new());
    let mut blocks = Vec::new();
    criterion.bench_function("1024 more tokens, sglang page 64", |bencher| {
        bencher.iter(|| {
            blocks.clear();
            let mut chain = known.clone();
            chain.extend(black_box(&tokens[known.covered_tokens()..]), &mut blocks);
            blocks.len()
        });
    });
}

criterion_group!(benches, whole_prompts, follow_up);
criterion_main!(benches);
