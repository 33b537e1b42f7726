//! Two stores in this process, with a segment each, and a master.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]
#![expect(unsafe_code, reason = "buffers are registered by address")]

use std::time::{Duration, Instant};

use moongate_master_client::rpc::PutMode;
use moongate_store::{InProcessStore, MemoryRange, StoreSettings};
use moongate_store_client::PutOptions;
use moongate_store_testkit::test_master::{TestMaster, start_master};

const SEGMENT: usize = 64 << 20;

/// The master's tasks run on the runtime, and the blocking calls of stores on the test's thread.
struct StorePair {
    first: InProcessStore,
    second: InProcessStore,
    _master: TestMaster,
    _runtime: tokio::runtime::Runtime,
}

fn settings(master: &str, segment: usize) -> StoreSettings {
    let values = [
        ("local_hostname", "127.0.0.1".to_owned()),
        ("metadata_server", "P2PHANDSHAKE".to_owned()),
        ("master_server_addr", master.to_owned()),
        ("global_segment_size", segment.to_string()),
    ];
    StoreSettings::from_dictionary(&values.map(|(name, value)| (name.to_owned(), value)).into()).unwrap()
}

fn store_pair() -> StorePair {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let master = runtime.block_on(async { start_master() });
    let address = master.rpc.address().to_string();
    let open = || InProcessStore::open(&settings(&address, SEGMENT)).unwrap();
    StorePair { first: open(), second: open(), _master: master, _runtime: runtime }
}

fn range(bytes: &mut [u8]) -> MemoryRange {
    MemoryRange { address: bytes.as_mut_ptr().expose_provenance(), size: bytes.len() }
}

fn register(store: &InProcessStore, buffer: MemoryRange) {
    // SAFETY: the tests register vectors that live as long as the store's last call and are used by one thread. They look at a vector
    // between calls only.
    unsafe { store.memory.register(buffer) }.unwrap();
}

fn content(size: usize) -> Vec<u8> {
    (0..size).map(|index| (index * 7 % 251) as u8).collect()
}

fn part(whole: MemoryRange, from: usize, size: usize) -> MemoryRange {
    MemoryRange { address: whole.address + from, size }
}

#[test]
fn objects_move_between_buffers_of_two_stores() {
    let stores = store_pair();
    let (mut source, mut target) = (content(9 << 20), vec![0; 9 << 20]);
    let (from, into) = (range(&mut source), range(&mut target));
    register(&stores.first, from);
    register(&stores.second, into);
    let keys = ["a", "b", "c"].map(str::to_owned);
    let buffers = vec![
        vec![from],
        vec![part(from, 10, 100), part(from, 5000, 3), part(from, 300, 50)],
        vec![part(from, 0, 4096), part(from, 4096, 4096)],
    ];
    let put = |keys: &[String]| stores.first.put_from(PutMode::Put, keys, &buffers, &PutOptions::default());
    assert_eq!(put(&keys), [0, 0, 0]);
    assert_eq!(put(&keys), [0, 0, 0], "existing objects are no failure");
    let get = |keys: &[String], buffers: &[Vec<MemoryRange>], is_exact| {
        stores.second.get_into(&stores.second.memory, keys, buffers, is_exact)
    };
    assert_eq!(get(&keys[..1], &[vec![into]], true), [9 << 20]);
    assert!(target == source);
    target.fill(0);
    let pieces = vec![vec![part(into, 900, 3), part(into, 100, 150)], vec![part(into, 10_000, 8192)]];
    assert_eq!(get(&keys[1..], &pieces, true), [153, 8192]);
    let gathered = [&source[10..110], &source[5000..5003], &source[300..350]].concat();
    assert_eq!([&target[900..903], &target[100..250]].concat(), gathered);
    assert_eq!(target[10_000..18_192], source[..8192]);
    assert_eq!(target.iter().filter(|byte| **byte != 0).count(), {
        let placed = gathered.iter().chain(&source[..8192]);
        placed.filter(|byte| **byte != 0).count()
    });
}

#[test]
fn large_objects_may_be_in_many_ranges() {
    let stores = store_pair();
    // Several slices, whose ends are within ranges.
    let (mut source, mut target) = (content(18 << 20), vec![0; 18 << 20]);
    let (from, into) = (range(&mut source), range(&mut target));
    register(&stores.first, from);
    register(&stores.second, into);
    // Every second piece of memory, from the last one to the first.
    let pieces =
        |whole, size| (0..(18 << 20) / size / 2).rev().map(|n| part(whole, 2 * n * size, size)).collect();
    let (read, written): (Vec<_>, Vec<_>) = (pieces(from, 30_011), pieces(into, 30_011));
    let size = read.iter().map(|range| range.size).sum::<usize>();
    assert!(size > 9_000_000 && read.len() > 300);
    for (mode, keys) in [(PutMode::Put, vec!["one"]), (PutMode::Upsert, vec!["two", "three"])] {
        let keys: Vec<String> = keys.into_iter().map(str::to_owned).collect();
        let sources = vec![read.clone(); keys.len()];
        let put = stores.first.put_from(mode, &keys, &sources, &PutOptions::default());
        assert_eq!(put, vec![0; keys.len()]);
        target.fill(0);
        // The first object only: two cannot be read into the same ranges.
        let got =
            stores.second.get_into(&stores.second.memory, &keys[..1], std::slice::from_ref(&written), true);
        assert_eq!(got, [size as i64]);
        for n in 0..(18 << 20) / 30_011 {
            let expected = if n % 2 == 0 { &source[n * 30_011..][..30_011] } else { &[0; 30_011][..] };
            assert!(target[n * 30_011..][..30_011] == *expected, "{keys:?}, piece {n}");
        }
        // The object does not fit, or does not fill the ranges.
        let get = |buffers: Vec<MemoryRange>, is_exact| {
            stores.second.get_into(&stores.second.memory, &keys[..1], &[buffers], is_exact)
        };
        assert_eq!(get(written[1..].to_vec(), true), [-600]);
        let more = [written.clone(), vec![part(into, 30_011, 10)]].concat();
        assert_eq!((get(more.clone(), true), get(more, false)), (vec![-800], vec![size as i64]));
    }
}

#[test]
fn wrong_buffers_fail_only_for_their_object() {
    let stores = store_pair();
    let mut bytes = content(10_000);
    let (known, mut stray) = (range(&mut bytes), vec![1; 10]);
    let stray = range(&mut stray);
    register(&stores.first, known);
    let keys = ["a", "b", "c", "d"].map(str::to_owned);
    let buffers = vec![vec![part(known, 0, 100)], vec![stray], vec![part(known, 9_950, 51)], vec![]];
    let options = PutOptions::default();
    assert_eq!(stores.first.put_from(PutMode::Put, &keys, &buffers, &options), [0, -600, -600, -600]);
    assert_eq!(stores.first.put_from(PutMode::Put, &keys, &buffers[..2], &options), [-600; 4]);
    assert_eq!(stores.first.get_into(&stores.first.memory, &keys, &buffers, false), [100, -600, -600, -600]);
    let memory = &stores.first.memory;
    assert_eq!(stores.first.get_into(memory, &keys[..1], &[vec![part(known, 0, 99)]], false), [-600]);
    assert_eq!(stores.first.get_into(memory, &keys[..1], &[vec![part(known, 0, 101)]], true), [-800]);
    let same = [vec![part(known, 500, 200)], vec![part(known, 600, 200)]];
    let twice = ["a", "a"].map(str::to_owned);
    assert_eq!(stores.first.get_into(memory, &twice, &same, false), [100, 100], "one after another");
}

#[test]
fn each_object_of_a_put_has_its_group() {
    let stores = store_pair();
    let groups = |names: &[&str]| PutOptions {
        object_groups: names.iter().map(|name| (*name).to_owned()).collect(),
        ..PutOptions::default()
    };
    let objects: [(&str, &[u8]); 2] = [("x", b"x"), ("y", b"y")];
    assert_eq!(stores.first.put(PutMode::Put, &objects, &groups(&["g", "h"])), [0, 0]);
    assert_eq!(stores.first.put(PutMode::Put, &objects, &groups(&["g"])), [-600, -600]);
    let none = PutOptions { replicas: 0, ..PutOptions::default() };
    assert_eq!(stores.first.put(PutMode::Put, &objects, &none), [-600, -600]);
    assert_eq!(stores.second.exist(&["x", "y", "z"]), [1, 1, 0]);
}

#[test]
fn a_closed_segment_leaves_the_store() {
    let stores = store_pair();
    let preferred = |store: &InProcessStore| PutOptions {
        preferred_segments: vec![store.hostname().to_owned()],
        ..PutOptions::default()
    };
    let put = |key, store| stores.first.put(PutMode::Put, &[(key, b"bytes")], &preferred(store));
    assert_eq!((put("own", &stores.first), put("other", &stores.second)), (vec![0], vec![0]));
    assert_eq!(stores.second.get("own").as_deref(), Ok(&b"bytes"[..]));
    stores.second.close();
    assert_eq!(stores.first.get("other"), Err(-704));
    assert_eq!(stores.first.get("own").as_deref(), Ok(&b"bytes"[..]));
    // Longer than the time after which a session first handles the state of its connections.
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!((stores.first.health(), stores.second.health()), (0, 0));
    assert_eq!(stores.first.remove(&["own"], true), [0]);
    assert_eq!(stores.first.remove(&["own", "other"], true), [-704, -704]);
}

#[test]
fn puts_to_a_full_store_fail_at_once() {
    let stores = store_pair();
    stores.first.close();
    stores.second.close();
    let keys: Vec<String> = (0..2000).map(|number| format!("k{number}")).collect();
    let objects: Vec<(&str, &[u8])> = keys.iter().map(|key| (key.as_str(), &b"x"[..])).collect();
    let start = Instant::now();
    assert_eq!(stores.first.put(PutMode::Put, &objects, &PutOptions::default()), [-200; 2000]);
    // With pauses, as a command of `moongate kv` makes them, it takes more than a minute.
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn setup_without_a_master_fails_at_once() {
    for segment in [0, SEGMENT] {
        let failed = InProcessStore::open(&settings("127.0.0.1:1", segment));
        assert_eq!(failed.err().map(|error| error.code()), Some(-1), "{segment}");
    }
}
