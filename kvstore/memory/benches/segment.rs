//! Costs of reopening a persistent segment, and of ledger and checksum per write.
#![expect(clippy::unwrap_used, reason = "a benchmark ends by panicking")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use moongate_memory::ledger::SegmentIdentity;
use moongate_memory::numa::NumaPlacement;
use moongate_memory::{MappedRegion, PageMode, SegmentBacking, SegmentMemory, SegmentOptions};

const SIZE: u64 = 10 << 30;
/// Smallest object size for which the ledger has enough slots.
const OBJECT: u64 = 4 << 10;

fn open(folder: &std::path::Path) -> SegmentMemory {
    let options = SegmentOptions {
        backing: SegmentBacking::Folder(folder.to_owned()),
        label: "bench".into(),
        size: SIZE,
        pages: PageMode::Normal,
        placement: NumaPlacement::Anywhere,
        direct_writes: false,
    };
    SegmentMemory::open(&options, |base| SegmentIdentity {
        name: "bench".into(),
        base,
        ..SegmentIdentity::default()
    })
    .unwrap()
}

/// Reopens a segment of 10 GiB with a full ledger. The object bytes are never touched, so they use no memory.
fn reattach(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    // A sparse file: reserving 10 GiB is not part of the measurement.
    std::fs::File::create(folder.path().join("bench.segment")).unwrap().set_len(SIZE).unwrap();
    let segment = open(folder.path());
    for index in 0..SIZE / OBJECT {
        segment.ledger.begin(index * OBJECT, OBJECT).unwrap().finish(7);
    }
    assert_eq!(segment.ledger.counts().entries, SIZE / OBJECT);
    drop(segment);
    let mut group = criterion.benchmark_group("segment");
    group.sample_size(10);
    group.bench_function("reattach 10 GiB with 2621440 entries", |bencher| {
        bencher.iter(|| assert!(open(folder.path()).is_restored));
    });
    group.finish();
}

fn write(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::File::create(folder.path().join("bench.segment")).unwrap().set_len(SIZE).unwrap();
    let segment = open(folder.path());
    for index in 0..SIZE / OBJECT {
        segment.ledger.begin(index * OBJECT, OBJECT).unwrap().finish(7);
    }
    criterion.bench_function("ledger: begin and finish over an existing entry", |bencher| {
        let mut index = 0;
        bencher.iter(|| {
            index = (index + 7919) % (SIZE / OBJECT);
            segment.ledger.begin(index * OBJECT, OBJECT).unwrap().finish(8)
        });
    });
}

fn checksum(criterion: &mut Criterion) {
    let region = MappedRegion::anonymous(256 << 20, PageMode::Transparent).unwrap();
    for index in 0..256 {
        region.write_at(index << 20, &vec![index as u8; 1 << 20]).unwrap();
    }
    let mut group = criterion.benchmark_group("crc32c");
    for (name, len) in [("64 KiB, in the CPU cache", 64 << 10), ("256 MiB, from memory", 256 << 20)] {
        group.throughput(Throughput::Bytes(len));
        group.bench_function(name, |bencher| bencher.iter(|| black_box(region.crc32c(0, len).unwrap())));
    }
    group.finish();
}

criterion_group!(benches, reattach, write, checksum);
criterion_main!(benches);
