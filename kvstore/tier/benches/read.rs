//! Read throughput of a tier, compared with fio on the same file, block size and depth. To measure a disk, use a folder on it:
//! `TMPDIR=/mnt/nvme cargo bench -p moongate-tier`.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark prints its results, and fails by panicking"
)]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use moongate_tier::{FileTier, TierOptions};

const OBJECT: usize = 4 << 20;
const TOTAL: usize = 512 << 20;
/// Objects read at the same time.
const BATCH: usize = 8;
const TIME: Duration = Duration::from_secs(1);
const ROUNDS: usize = 5;

fn main() {
    println!(
        "objects of 4 MiB, 512 MiB of them, one thread; GB/s, median of {ROUNDS} rounds of {} s",
        TIME.as_secs()
    );
    println!("block      put   get one   get 8   threads 8   fio 32 deep   get 8 / fio");
    for block in [64 << 10, 256 << 10, 1 << 20] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tier");
        // Filled completely: unwritten parts are read without the disk, and fio reads everywhere.
        let pages = TOTAL as u64 / u64::from(block) * 4096;
        let options = TierOptions { block, ..TierOptions::new(&path, TOTAL as u64 + pages + (2 << 20)) };
        let tier = FileTier::open(&options).unwrap();
        let put = put(&tier);
        drop(tier);
        let mut rates = [vec![], vec![], vec![], vec![]];
        for _ in 0..ROUNDS {
            let tier = FileTier::open(&options).unwrap();
            rates[0].push(get(&tier, 1));
            rates[1].push(get(&tier, BATCH));
            drop(tier);
            let tier = FileTier::open(&TierOptions { io_uring: false, ..options.clone() }).unwrap();
            rates[2].push(get(&tier, BATCH));
            drop(tier);
            rates[3].push(fio(&path, block));
        }
        let [single, batch, threads, fio] = rates.map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            rates[ROUNDS / 2]
        });
        let size = format!("{} KiB", block >> 10);
        println!(
            "{size:8} {put:5.2} {single:9.2} {batch:7.2} {threads:11.2} {fio:13.2} {:13.2}",
            batch / fio
        );
    }
}

fn put(tier: &FileTier) -> f64 {
    let mut object = vec![0; OBJECT];
    fastrand::fill(&mut object);
    let started = Instant::now();
    for key in 0..TOTAL / OBJECT {
        object[..8].copy_from_slice(&key.to_le_bytes());
        tier.put(&key.to_le_bytes(), &object).unwrap();
    }
    rate(TOTAL, started)
}

/// Reads objects in random order, copied out as a store copies them into its memory.
fn get(tier: &FileTier, batch: usize) -> f64 {
    let mut into = vec![0u8; OBJECT];
    let mut bytes = 0;
    let started = Instant::now();
    while started.elapsed() < TIME {
        let keys: Vec<[u8; 8]> =
            (0..batch).map(|_| fastrand::usize(..TOTAL / OBJECT).to_le_bytes()).collect();
        let keys: Vec<&[u8]> = keys.iter().map(<[u8; 8]>::as_slice).collect();
        let results = tier.get_many(&keys, |_, offset, part| {
            into[offset as usize..][..part.len()].copy_from_slice(part);
        });
        bytes += results.into_iter().map(|result| result.unwrap().unwrap() as usize).sum::<usize>();
    }
    rate(bytes, started)
}

fn rate(bytes: usize, started: Instant) -> f64 {
    bytes as f64 / started.elapsed().as_secs_f64() / 1e9
}

/// Read rate of fio in GB/s; NaN if fio is not installed.
fn fio(path: &Path, block: u32) -> f64 {
    let output = Command::new("fio")
        .args([
            "--name=read",
            "--rw=randread",
            "--direct=1",
            "--ioengine=io_uring",
            "--iodepth=32",
            "--readonly",
        ])
        .args(["--time_based", "--output-format=terse"])
        .arg(format!("--filename={}", path.display()))
        .arg(format!("--bs={block}"))
        .arg(format!("--runtime={}", TIME.as_secs()))
        .output();
    let Ok(output) = output else { return f64::NAN };
    let text = String::from_utf8(output.stdout).unwrap();
    // Terse output: the seventh field is the read rate in KiB/s.
    let field = text.lines().find(|line| line.contains(';')).and_then(|line| line.split(';').nth(6));
    field.and_then(|field| field.parse::<f64>().ok()).map_or(f64::NAN, |kib| kib * 1024.0 / 1e9)
}
