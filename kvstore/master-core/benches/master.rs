//! Cost of the master's operations with a million keys of SGLang's length.
#![expect(clippy::unwrap_used, reason = "a benchmark")]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master_core::{CallContext, MasterCore, MasterCoreOptions, PutStartRequest};

const KEYS: usize = 1_000_000;
const BATCH: usize = 512;
const CLIENT: Uuid = Uuid { first: 1, second: 1 };
const TENANT: &str = "default";

fn key(number: usize) -> String {
    let mut random = fastrand::Rng::with_seed(number as u64);
    let words = [(); 4].map(|()| format!("{:016x}", random.u64(..)));
    format!("{}_0_k", words.concat())
}

fn master(segment: u64) -> MasterCore {
    let master = MasterCore::new(MasterCoreOptions { ramp_ms: 0, ..MasterCoreOptions::default() });
    for number in 0..4 {
        let segment = Segment {
            id: Uuid { first: number, second: 1 },
            name: format!("10.0.0.{number}:12000"),
            base: 1 << 40,
            size: segment,
            ..Segment::<String>::default()
        };
        master.mount(0, &segment, CLIENT, &mut ()).unwrap();
    }
    master
}

fn put(master: &MasterCore, now: u64, key: &str, size: u64) {
    let config = ReplicateConfig::<&str>::default();
    let context = CallContext { now_ms: now, client: CLIENT, tenant: TENANT };
    black_box(master.put_start(context, &PutStartRequest { key, size, config: &config }, &mut ()).unwrap());
    let meta = ObjectMeta { key, object_checksum: None };
    master.put_end(context, &meta, ReplicaType::ALL, &mut ()).unwrap();
}

fn reading(criterion: &mut Criterion) {
    let master = master(1 << 40);
    let keys: Vec<String> = (0..KEYS).map(key).collect();
    for (now, key) in keys.iter().enumerate() {
        put(&master, now as u64, key, 1024);
    }
    let mut random = fastrand::Rng::with_seed(1);
    let mut now = 2_000_000;
    criterion.bench_function("exist", |bencher| {
        bencher.iter_batched(
            || keys[random.usize(..KEYS)].clone(),
            |key| master.exist(2_000_000, TENANT, &key),
            BatchSize::SmallInput,
        );
    });
    let mut found = Vec::new();
    // As in the server: the keys have just been received, so they are in the CPU cache.
    let batch = |random: &mut fastrand::Rng| {
        (0..BATCH).map(|_| keys[random.usize(..KEYS)].clone()).collect::<Vec<String>>()
    };
    criterion.bench_function("batch_exist 512", |bencher| {
        bencher.iter_batched(
            || batch(&mut random),
            |keys| {
                now += 1;
                master.batch_exist(now, TENANT, &keys, &mut found);
                keys
            },
            BatchSize::SmallInput,
        );
    });
    criterion.bench_function("batch_exist 512, 2 threads", |bencher| {
        bencher.iter_custom(|rounds| {
            let batches: Vec<Vec<String>> = (0..64).map(|_| batch(&mut random)).collect();
            let started = std::time::Instant::now();
            std::thread::scope(|scope| {
                for half in batches.chunks(32) {
                    scope.spawn(|| {
                        let mut found = Vec::new();
                        for round in 0..rounds {
                            master.batch_exist(3_000_000, TENANT, &half[round as usize % 32], &mut found);
                        }
                    });
                }
            });
            started.elapsed()
        });
    });
    criterion.bench_function("batch_replicas 512", |bencher| {
        bencher.iter_batched(
            || batch(&mut random),
            |keys| (master.batch_replicas(4_000_000, TENANT, &keys), keys),
            BatchSize::SmallInput,
        );
    });
    criterion.bench_function("peek 512", |bencher| {
        bencher.iter_batched(
            || batch(&mut random),
            |keys| (master.peek(TENANT, &keys), keys),
            BatchSize::SmallInput,
        );
    });
}

fn writing(criterion: &mut Criterion) {
    let mut number = 0;
    let large = master(1 << 50);
    criterion.bench_function("put_start, put_end", |bencher| {
        bencher.iter_batched(
            || {
                number += 1;
                (number, key(number))
            },
            |(number, key)| put(&large, number as u64, &key, 1024),
            BatchSize::SmallInput,
        );
    });
    drop(large);
    let full = master(256 << 20);
    for number in 0..KEYS {
        put(&full, number as u64, &key(number), 1024);
    }
    let mut number = KEYS;
    criterion.bench_function("put_start, put_end into a full store", |bencher| {
        bencher.iter_batched(
            || {
                number += 1;
                (number, key(number))
            },
            |(number, key)| put(&full, number as u64, &key, 1024),
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, reading, writing);
criterion_main!(benches);
