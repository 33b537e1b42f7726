//! KV index benchmarks: lookups, events, both concurrently, and memory. For comparison, a lookup of object keys by
//! text.
//!
//! The index is the scheduler's, its lock the gateway's. Prints what criterion does not report. Needs about 1.5 GiB of memory.
//! `cargo bench -p moongate-gateway --bench index`.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a benchmark fails by panicking and reports to a person"
)]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dashmap::DashSet;
use hdrhistogram::Histogram;
use moongate_gateway::SpinRwLock;
use moongate_scheduler::StoreMedium;
use moongate_scheduler::index::{
    BlockHashNamespace, BlockPartIndex, EngineCacheTier, EngineSlot, IndexLookup, KvBlockIndex, StoreNodeSlot,
};

const ENGINES: usize = 64;
const NODES: usize = 16;
/// 131,072 tokens in pages of 64.
const PROMPT_PAGES: usize = 2048;
/// Blocks per conversation in the index.
const CONVERSATION: usize = 512;
/// Events applied in one batch.
const BATCH: usize = 64;
/// Blocks changed per acquisition of the lock.
const CHANGES_PER_LOCK: usize = 8;
/// Objects of a block with 4 ranks: keys and values of each.
const OBJECTS: usize = 8;

/// An index filled as by a real fleet.
struct FilledIndex {
    index: KvBlockIndex,
    engines: Vec<EngineSlot>,
    nodes: Vec<StoreNodeSlot>,
    conversations: usize,
    space: BlockHashNamespace,
}

impl FilledIndex {
    /// Each conversation is in L1 of one or two engines up to some block, in L2 of one engine a little further, and
    /// entirely in the store.
    fn with(pages: usize) -> Self {
        let mut index = KvBlockIndex::new(pages + PROMPT_PAGES + 1_000_000);
        let engines: Vec<EngineSlot> = (0..ENGINES).map(|_| index.add_engine()).collect();
        let nodes: Vec<StoreNodeSlot> = (0..NODES).map(|_| index.add_store_node().unwrap()).collect();
        let space = BlockHashNamespace::new(&["model", "64", "sglang"]);
        let conversations = pages / CONVERSATION;
        let mut filled = Self { index, engines, nodes, conversations, space };
        let mut random = fastrand::Rng::with_seed(1);
        for conversation in 0..conversations {
            let pages = filled.conversation(conversation);
            let (medium, node) = (random.bool(), random.usize(..NODES));
            let medium = if medium { StoreMedium::Dram } else { StoreMedium::Nvme };
            let part = BlockPartIndex::new(0, 1).unwrap();
            for &page in &pages {
                filled.index.add_store_part(page, part, filled.nodes[node], medium);
            }
            for _ in 0..random.usize(1..3) {
                let engine = filled.engines[random.usize(..ENGINES)];
                let in_l1 = random.usize(..CONVERSATION);
                filled.index.add_engine_blocks(engine, EngineCacheTier::L1, &pages[..in_l1]);
                filled.index.add_engine_blocks(
                    engine,
                    EngineCacheTier::L2,
                    &pages[..random.usize(in_l1..CONVERSATION)],
                );
            }
        }
        filled
    }

    fn page(&self, number: u64) -> u64 {
        // Block hashes are evenly distributed.
        self.space.key(fastrand::Rng::with_seed(number).u64(..))
    }

    fn conversation(&self, number: usize) -> Vec<u64> {
        (0..CONVERSATION).map(|page| self.page((number * CONVERSATION + page) as u64)).collect()
    }

    /// A prompt of which every engine has a prefix of different length, and the store everything.
    fn prompt(&mut self) -> Vec<u64> {
        let pages: Vec<u64> = (0..PROMPT_PAGES as u64).map(|page| self.page(1 << 40 | page)).collect();
        for (number, &engine) in self.engines.iter().enumerate() {
            self.index.add_engine_blocks(
                engine,
                EngineCacheTier::L1,
                &pages[..(number + 1) * PROMPT_PAGES / ENGINES],
            );
            self.index.add_engine_blocks(
                engine,
                EngineCacheTier::L2,
                &pages[..(number + 2).min(ENGINES) * PROMPT_PAGES / ENGINES],
            );
        }
        let part = BlockPartIndex::new(0, 1).unwrap();
        for (microseconds, &page) in pages.iter().enumerate() {
            self.index.add_store_part(
                page,
                part,
                self.nodes[microseconds * NODES / PROMPT_PAGES],
                StoreMedium::Dram,
            );
        }
        pages
    }

    /// A prompt that every engine has entirely. Each block has another combination of tiers and another store node than
    /// the previous one.
    fn patchwork(&mut self) -> Vec<u64> {
        let pages: Vec<u64> = (0..PROMPT_PAGES as u64).map(|page| self.page(1 << 41 | page)).collect();
        let part = BlockPartIndex::new(0, 1).unwrap();
        for (microseconds, &page) in pages.iter().enumerate() {
            for (number, &engine) in self.engines.iter().enumerate() {
                let tier =
                    if number % 7 == microseconds % 7 { EngineCacheTier::L2 } else { EngineCacheTier::L1 };
                self.index.add_engine_blocks(engine, tier, &[page]);
            }
            self.index.add_store_part(page, part, self.nodes[microseconds % NODES], StoreMedium::Dram);
        }
        pages
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Times each call separately: on a busy machine the fast percentiles are more meaningful than a mean.
fn spread(name: &str, mut call: impl FnMut()) {
    let mut durations = Histogram::<u64>::new(3).unwrap();
    for _ in 0..20_000 {
        let started = Instant::now();
        call();
        durations.record(started.elapsed().as_nanos() as u64).unwrap();
    }
    let microseconds = |quantile| durations.value_at_quantile(quantile) as f64 / 1e3;
    eprintln!(
        "{name}: fastest {:.1} µs, p10 {:.1} µs, p50 {:.1} µs",
        microseconds(0.0),
        microseconds(0.1),
        microseconds(0.5)
    );
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn at_size(criterion: &mut Criterion, pages: usize, name: &str) {
    let before = resident_bytes();
    let start = Instant::now();
    let mut filled = FilledIndex::with(pages);
    let size = filled.index.size();
    let grown = resident_bytes().saturating_sub(before);
    eprintln!(
        "{name}: {} pages, {} placements, filled in {:.1} s; {:.1} B/page resident, {:.1} B/page by its own count",
        size.blocks,
        size.placements,
        start.elapsed().as_secs_f64(),
        grown as f64 / size.blocks as f64,
        size.bytes as f64 / size.blocks as f64,
    );
    let prompts = [
        ("2048 pages, prefixes of 64 engines", filled.prompt()),
        ("2048 pages, patchwork", filled.patchwork()),
    ];
    let mut hits = IndexLookup::default();
    let mut group = criterion.benchmark_group(format!("lookup, {name}"));
    group.throughput(Throughput::Elements(PROMPT_PAGES as u64));
    for (kind, prompt) in prompts {
        spread(&format!("{name}: lookup of {kind}"), || {
            filled.index.lookup(black_box(&prompt), &mut hits);
        });
        group.bench_function(kind, |bencher| {
            bencher.iter(|| filled.index.lookup(black_box(&prompt), &mut hits));
        });
    }
    let all: Vec<Vec<u64>> = (0..filled.conversations.min(8192))
        .map(|number| filled.conversation(number * filled.conversations / filled.conversations.min(8192)))
        .collect();
    let mut next = 0;
    spread(&format!("{name}: lookup of 512 pages of another conversation each time"), || {
        next = (next + 1) % all.len();
        filled.index.lookup(black_box(&all[next]), &mut hits);
    });
    group.throughput(Throughput::Elements(CONVERSATION as u64));
    group.bench_function("512 pages of another conversation each time", |bencher| {
        bencher.iter(|| {
            next = (next + 1) % all.len();
            filled.index.lookup(black_box(&all[next]), &mut hits);
        });
    });
    group.finish();
    events(&mut filled, name);
    clearing(&mut filled, name);
    while_applying(filled, name);
}

/// Single events for one block each, half of them removals, on random conversations of the index.
fn events(filled: &mut FilledIndex, name: &str) {
    let mut random = fastrand::Rng::with_seed(2);
    let keys: Vec<(EngineSlot, u64)> = (0..1_000_000)
        .map(|_| {
            let page = random.u64(..(filled.conversations * CONVERSATION) as u64);
            (filled.engines[random.usize(..ENGINES)], filled.page(page))
        })
        .collect();
    let mut batches = Histogram::<u64>::new(3).unwrap();
    let start = Instant::now();
    for batch in keys.chunks(BATCH / 2) {
        let started = Instant::now();
        for &(engine, page) in batch {
            filled.index.add_engine_blocks(engine, EngineCacheTier::L1, &[page]);
        }
        for &(engine, page) in batch {
            filled.index.remove_engine_blocks(engine, EngineCacheTier::L1, &[page]);
        }
        batches.record(started.elapsed().as_nanos() as u64).unwrap();
    }
    let rate = 2.0 * keys.len() as f64 / start.elapsed().as_secs_f64() / 1e6;
    let microseconds = |quantile| batches.value_at_quantile(quantile) as f64 / 1e3;
    eprintln!(
        "{name}: {rate:.2} M scattered single-page events/s; batch of {BATCH}: p50 {:.1} µs, p99 {:.1} µs, p99.9 {:.1} µs, max {:.1} µs",
        microseconds(0.5),
        microseconds(0.99),
        microseconds(0.999),
        batches.max() as f64 / 1e3,
    );
    let fresh: Vec<u64> = (0..1_000_000).map(|page| filled.page(1 << 42 | page)).collect();
    let mut batches = Histogram::<u64>::new(3).unwrap();
    let start = Instant::now();
    for (number, batch) in fresh.chunks(BATCH).enumerate() {
        let started = Instant::now();
        filled.index.add_engine_blocks(filled.engines[number / 8 % ENGINES], EngineCacheTier::L1, batch);
        batches.record(started.elapsed().as_nanos() as u64).unwrap();
    }
    let rate = fresh.len() as f64 / start.elapsed().as_secs_f64() / 1e6;
    let microseconds = |quantile| batches.value_at_quantile(quantile) as f64 / 1e3;
    eprintln!(
        "{name}: {rate:.2} M new pages/s; batch of {BATCH}: p50 {:.1} µs, p99 {:.1} µs, p99.9 {:.1} µs, max {:.1} µs",
        microseconds(0.5),
        microseconds(0.99),
        microseconds(0.999),
        batches.max() as f64 / 1e3,
    );
}

fn clearing(filled: &mut FilledIndex, name: &str) {
    let start = Instant::now();
    filled.index.clear_engine_tier(filled.engines[0], EngineCacheTier::L1);
    filled.index.clear_engine_tier(filled.engines[0], EngineCacheTier::L2);
    let cleared = start.elapsed();
    let start = Instant::now();
    let (mut longest, mut steps) = (Duration::ZERO, 0);
    loop {
        let started = Instant::now();
        let more = filled.index.sweep(1024);
        longest = longest.max(started.elapsed());
        steps += 1;
        if !more {
            break;
        }
    }
    eprintln!(
        "{name}: an engine is cleared in {:.1} µs; swept in {steps} steps of 1024 entries, {:.0} ms together, longest {:.0} µs",
        micros(cleared),
        start.elapsed().as_secs_f64() * 1e3,
        micros(longest),
    );
}

/// One thread looks up while another applies batches of events under the same lock.
fn while_applying(filled: FilledIndex, name: &str) {
    let mut random = fastrand::Rng::with_seed(3);
    let prompts: Vec<Vec<u64>> = (0..256)
        .map(|_| (0..4).flat_map(|_| filled.conversation(random.usize(..filled.conversations))).collect())
        .collect();
    let batches: Vec<(EngineSlot, Vec<u64>)> = (0..4096)
        .map(|_| {
            let conversation = filled.conversation(random.usize(..filled.conversations));
            (filled.engines[random.usize(..ENGINES)], conversation[..BATCH].to_vec())
        })
        .collect();
    let index = Arc::new(SpinRwLock::new(filled.index));
    let (stop, applied) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (index, stop, applied) = (Arc::clone(&index), Arc::clone(&stop), Arc::clone(&applied));
        thread::spawn(move || {
            let mut due = Instant::now();
            for (number, (engine, pages)) in batches.iter().cycle().enumerate() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                black_box(index.read().count_known(pages));
                for pages in pages.chunks(CHANGES_PER_LOCK) {
                    let mut index = index.write();
                    if (number / batches.len()).is_multiple_of(2) {
                        index.add_engine_blocks(*engine, EngineCacheTier::L1, pages);
                    } else {
                        index.remove_engine_blocks(*engine, EngineCacheTier::L1, pages);
                    }
                }
                applied.fetch_add(BATCH as u64, Ordering::Relaxed);
                // A million events a second, unless the lock delays them.
                due += Duration::from_micros(BATCH as u64);
                due = due.max(Instant::now() - Duration::from_millis(1));
                while Instant::now() < due {
                    std::hint::spin_loop();
                }
            }
        })
    };
    let mut durations = Histogram::<u64>::new(3).unwrap();
    let mut hits = IndexLookup::default();
    let start = Instant::now();
    for prompt in prompts.iter().cycle() {
        if start.elapsed() > Duration::from_secs(3) {
            break;
        }
        let started = Instant::now();
        hits.restart();
        while !index.read().lookup_step(prompt, &mut hits) {}
        durations.record(started.elapsed().as_nanos() as u64).unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    let rate = applied.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64() / 1e6;
    let microseconds = |quantile| durations.value_at_quantile(quantile) as f64 / 1e3;
    eprintln!(
        "{name}: {} lookups of 2048 blocks during {rate:.2} M events/s: p50 {:.1} µs, p99 {:.1} µs, p99.9 {:.1} µs",
        durations.len(),
        microseconds(0.5),
        microseconds(0.99),
        microseconds(0.999),
    );
}

fn index(criterion: &mut Criterion) {
    at_size(criterion, 10_000_000, "10 M pages");
    at_size(criterion, 1_000_000, "1 M pages");
}

/// The store's blocks as texts: every object key of every block is formatted and looked up.
fn object_keys(criterion: &mut Criterion) {
    let mut random = fastrand::Rng::with_seed(4);
    let digests: Vec<[u8; 32]> = (0..131_072)
        .map(|_| {
            let mut digest = [0; 32];
            random.fill(&mut digest);
            digest
        })
        .collect();
    let objects = |digest: &[u8; 32]| {
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        (0..OBJECTS)
            .map(move |object| format!("{hex}_{}_{}", object / 2, if object % 2 == 0 { "k" } else { "v" }))
    };
    let known: DashSet<String> = digests.iter().flat_map(objects).collect();
    let prompt = &digests[..PROMPT_PAGES];
    criterion.bench_function("object keys of 2048 pages in a concurrent set of texts", |bencher| {
        bencher.iter(|| {
            let complete = |digest: &&[u8; 32]| objects(digest).all(|key| known.contains(&key));
            black_box(prompt).iter().take_while(complete).count()
        });
    });
}

criterion_group!(benches, index, object_keys);
criterion_main!(benches);
