//! A master opens a folder with any file contents, and the next start then finds the files intact.
//!
//! The input is a byte with flags, then steps: a byte for the operation, a length of one byte, and as many bytes.

#![no_main]

use std::path::Path;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use moongate_master::durable::DurableJournal;
use moongate_master_core::MasterCoreOptions;
use moongate_oplog::{LogDirectory, OplogOptions};
use moongate_store_testkit::memory_disk::{FileContents, MemoryDisk};

const FOLDER: &str = "/data";

fn checked(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = crc32fast::hash(&bytes).to_le_bytes();
    bytes.extend(sum);
    bytes
}

/// The header of a log file.
fn head(first: u64, flushed: bool) -> Vec<u8> {
    let mut head =
        [&b"mgoplog1"[..], &first.to_le_bytes(), b"boot", &[0; 32], &[flushed.into()], &[0; 7]].concat();
    head = checked(head);
    head
}

fn frame(number: u64, record: &[u8]) -> Vec<u8> {
    let length = (record.len() as u32).to_le_bytes();
    let sum = crc32fast::hash(&[&length[..], &number.to_le_bytes(), record].concat());
    [&length[..], &sum.to_le_bytes(), &number.to_le_bytes(), record].concat()
}

fn files(flags: u8, mut steps: &[u8]) -> FileContents {
    let mut files = FileContents::new();
    let (mut next, flushed) = (1_u64, flags & 1 == 1);
    let log = |first: u64| Path::new(FOLDER).join(format!("log-{first:020}.log"));
    let mut newest = log(next);
    files.insert(newest.clone(), head(next, flushed));
    while let [step, length, rest @ ..] = steps {
        let (bytes, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        steps = rest;
        match step % 7 {
            0 => {
                files.entry(newest.clone()).or_default().extend(frame(next, bytes));
                next += 1;
            }
            1 => files.entry(newest.clone()).or_default().extend(bytes),
            2 => {
                newest = log(next);
                files.insert(newest.clone(), head(next, flushed));
            }
            3 => next += u64::from(*length),
            4 => {
                let mark = checked([&b"mgsynced"[..], &(next - 1).to_le_bytes()].concat());
                _ = files.insert(Path::new(FOLDER).join("synced"), mark);
            }
            5 => {
                let end = frame(u64::MAX, &1_u64.to_le_bytes());
                let path = Path::new(FOLDER).join(format!("snapshot-{:020}.snap", next - 1));
                _ = files.insert(path, [frame(0, bytes), end].concat());
            }
            _ => {
                // Corruption: each input byte selects a byte to change.
                let file = files.entry(newest.clone()).or_default();
                for at in bytes {
                    if let Some(byte) = file.get_mut(usize::from(*at) * 3) {
                        *byte ^= at | 1;
                    }
                }
            }
        }
    }
    files
}

fuzz_target!(|input: &[u8]| {
    let Some((flags, steps)) = input.split_first() else { return };
    let disk = MemoryDisk::with(files(*flags, steps));
    let boot_id = if flags & 2 == 0 { "boot" } else { "other" }.to_owned();
    let settings = MasterCoreOptions { shards: 2, ..MasterCoreOptions::default() };
    let open = || {
        let folder = Arc::new(LogDirectory::lock_on(Arc::new(disk.clone()), Path::new(FOLDER)).unwrap());
        let options = OplogOptions { boot_id: boot_id.clone(), ..OplogOptions::default() };
        DurableJournal::open_in(folder, options, &settings, 1000)
    };
    let opened = open().unwrap();
    opened.journal.log().close().unwrap();
    drop(opened);
    let again = open().unwrap().report;
    assert!(again.recovery.is_complete() && again.recovery.damage().is_none(), "{again}");
});
