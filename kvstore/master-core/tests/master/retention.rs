//! Eviction by learned return times.

use mooncake_wire::types::{ObjectMeta, ReplicaType};
use moongate_master_core::{
    BatchPutStartRequest, DescribedKeys, MasterCore, MasterCoreOptions, PromptDescription, PromptLength,
    PromptUse, RetentionPolicy, ReturnHint, SnapshotCursor, StateChange, TenantBucket,
};

use crate::harness::{MIB, TENANT, TestMasterCore, TestReplicateConfig, WRITER, caller, hard_pinned};

fn settings(retention: RetentionPolicy) -> MasterCoreOptions {
    MasterCoreOptions { retention, client_ttl_ms: u64::MAX / 4, ..MasterCoreOptions::default() }
}

/// One key per second for this long. Every third is one of 50 that return, after 150 seconds on average; the others are
/// new. There is space for about 110 keys. Returns the number of hits.
fn hits(world: &mut TestMasterCore, seconds: u64) -> u64 {
    let mut random = fastrand::Rng::with_seed(1);
    let mut hits = 0;
    for second in 0..seconds {
        world.tick(1_000);
        let key =
            if second % 3 == 0 { format!("returning{}", random.u8(..50)) } else { format!("new{second}") };
        if world.exists(&key) {
            hits += 1;
        } else {
            world.put(&key, MIB, &TestReplicateConfig::default()).unwrap();
        }
    }
    hits
}

#[test]
fn keys_that_return_stay_longer_than_with_lru() {
    let [lru, learned] = [RetentionPolicy::Lru, RetentionPolicy::Learned]
        .map(|retention| hits(&mut TestMasterCore::with_segments(settings(retention), &[128 * MIB]), 3_000));
    // Of 1,000 uses of returning keys, 950 could be hits.
    assert!(learned > lru + 200, "LRU {lru}, learned {learned}");
}

#[test]
fn leased_and_pinned_keys_stay_whatever_their_value() {
    let mut world = TestMasterCore::with_segments(settings(RetentionPolicy::Learned), &[128 * MIB]);
    world.put("pinned", MIB, &hard_pinned()).unwrap();
    hits(&mut world, 1_500);
    assert!(world.has("pinned"));
    // A key without any use would be evicted first.
    world.put("leased", MIB, &TestReplicateConfig::default()).unwrap();
    assert!(world.exists("leased"));
    for number in 0..90 {
        world.now += 1;
        world.put(&format!("burst{number}"), MIB, &TestReplicateConfig::default()).unwrap();
    }
    assert!(world.has("leased") && world.has("pinned"));
}

/// A prefix is useless without its start, so the end of a call's keys is evicted first.
#[test]
fn a_prompt_loses_its_end_first() {
    let mut world = TestMasterCore::with_segments(settings(RetentionPolicy::Learned), &[64 * MIB]);
    let keys: Vec<String> = (0..40).map(|number| format!("page{number:02}")).collect();
    let config = TestReplicateConfig::default();
    let request = BatchPutStartRequest { keys: &keys, sizes: &[MIB; 40], config: &config };
    let started = world.master.batch_put_start(caller(world.now, WRITER), &request, &mut world.changes);
    assert!(started.iter().all(Result::is_ok));
    let objects: Vec<_> = keys.iter().map(|key| ObjectMeta { key, object_checksum: None }).collect();
    let ended =
        world.master.batch_put_end(caller(world.now, WRITER), &objects, ReplicaType::ALL, &mut world.changes);
    assert!(ended.iter().all(Result::is_ok));
    let remaining = |world: &TestMasterCore| keys.iter().filter(|key| world.has(key)).count();
    let is_prefix = |world: &TestMasterCore| keys.iter().take(remaining(world)).all(|key| world.has(key));
    world.now += 60_000;
    for number in 0..34 {
        world.now += 1;
        world.put(&format!("other{number}"), MIB, &config).unwrap();
    }
    assert!(remaining(&world) < 40 && is_prefix(&world), "{}", remaining(&world));
    // The same after a lease.
    let mut found = Vec::new();
    world.master.batch_exist(world.now, TENANT, &keys, &mut found);
    world.now += 60_000;
    let before = remaining(&world);
    for number in 0..60 {
        world.now += 1;
        world.put(&format!("more{number}"), MIB, &config).unwrap();
    }
    // Leases of sixteen consecutive keys end at the same time.
    let first_kept = keys.iter().take(remaining(&world).saturating_sub(16)).all(|key| world.has(key));
    assert!(remaining(&world) < before && first_kept, "{}", remaining(&world));
}

fn described(world: &TestMasterCore, keys: &[String], hint: ReturnHint) -> [u64; 2] {
    described_by(0, world, keys, hint)
}

fn described_by(bucket: u8, world: &TestMasterCore, keys: &[String], hint: ReturnHint) -> [u64; 2] {
    let tenants = TenantBucket::new(bucket);
    let description = PromptDescription { length: PromptLength::Short, hint, tenants };
    let arrived_ms = world.now - 500;
    let prompt = PromptUse { now_ms: world.now, arrived_ms, description };
    let DescribedKeys { existing, announced } = world.master.describe_prompt(TENANT, keys, prompt);
    [existing, announced]
}

/// As many keys that return once, after a minute, as keys that do not. There is space for the former only. Returns the number of
/// hits.
fn hits_with_hints(hinted: bool) -> usize {
    let mut world = TestMasterCore::with_segments(settings(RetentionPolicy::Learned), &[100 * MIB]);
    let mut hits = 0;
    for second in 0..2_000_u64 {
        world.tick(1_000);
        for (name, hint) in [("once", ReturnHint::Never), ("again", ReturnHint::Expected)] {
            let key = format!("{name}{second}");
            // Half of the descriptions arrive before the key is written.
            let is_early = hinted && second % 2 == 0;
            if is_early {
                assert_eq!(described(&world, std::slice::from_ref(&key), hint), [0, 1]);
            }
            world.put(&key, MIB, &TestReplicateConfig::default()).unwrap();
            if hinted && !is_early {
                assert_eq!(described(&world, &[key], hint), [1, 0]);
            }
        }
        if second >= 60 {
            let key = format!("again{}", second - 60);
            hits += usize::from(world.exists(&key));
            if hinted {
                described(&world, &[key], ReturnHint::Never);
            }
        }
    }
    hits
}

#[test]
fn hints_decide_between_keys_that_look_alike() {
    let [without, with] = [false, true].map(hits_with_hints);
    assert!(without < 600 && with > 1_700, "{without} of 1,940 without hints, {with} with");
}

/// One tenant writes one key per second, which returns once after a minute; another writes three, which do not. Both say that their
/// keys return. There is space for a third of all keys of a minute. Returns the number of hits.
fn hits_beside_wrong_hints(wrong_bucket: u8) -> usize {
    let mut world = TestMasterCore::with_segments(settings(RetentionPolicy::Learned), &[96 * MIB]);
    let mut hits = 0;
    for second in 0..2_000_u64 {
        world.tick(1_000);
        for (bucket, name) in
            [(1, "right"), (wrong_bucket, "wrong0"), (wrong_bucket, "wrong1"), (wrong_bucket, "wrong2")]
        {
            let key = format!("{name}-{second}");
            world.put(&key, MIB, &TestReplicateConfig::default()).unwrap();
            described_by(bucket, &world, &[key], ReturnHint::Expected);
        }
        if let Some(before) = second.checked_sub(60) {
            let key = format!("right-{before}");
            hits += usize::from(world.exists(&key));
            described_by(1, &world, &[key], ReturnHint::Never);
        }
    }
    hits
}

#[test]
fn wrong_hints_do_not_cost_other_tenants_their_hits() {
    let [shared, separate] = [1, 2].map(hits_beside_wrong_hints);
    assert!(shared < 600 && separate > 1_700, "{shared} of 1,940 in one bucket, {separate} in two");
}

#[test]
fn descriptions_neither_remove_nor_protect_what_is_not_theirs() {
    let mut world = TestMasterCore::with_segments(settings(RetentionPolicy::Learned), &[64 * MIB]);
    world.put("pinned", MIB, &hard_pinned()).unwrap();
    world.put("plain", MIB, &TestReplicateConfig::default()).unwrap();
    let keys = ["pinned", "plain", "absent"].map(str::to_owned);
    assert_eq!(described(&world, &keys, ReturnHint::Never), [2, 1]);
    assert!(world.has("pinned") && world.has("plain") && !world.has("absent"));
    let mut lru = TestMasterCore::with_segments(settings(RetentionPolicy::Lru), &[64 * MIB]);
    lru.put("plain", MIB, &TestReplicateConfig::default()).unwrap();
    assert_eq!(described(&lru, &keys, ReturnHint::Never), [0, 0], "no effect without learned retention");
}

#[test]
fn another_master_continues_with_what_was_learned() {
    let mut world = TestMasterCore::with_segments(settings(RetentionPolicy::Learned), &[128 * MIB]);
    hits(&mut world, 1_500);
    let learned = |changes: &[StateChange<'static>]| {
        changes.iter().rev().find(|change| matches!(change, StateChange::ReturnTimes { .. })).cloned()
    };
    let last = learned(&world.changes).expect("emitted every five minutes");
    let other = MasterCore::new(settings(RetentionPolicy::Learned));
    other.apply(&last).unwrap();
    let mut snapshot = Vec::new();
    let _ = other.snapshot(SnapshotCursor::default(), 100, &mut snapshot);
    assert_eq!(learned(&snapshot), Some(last));
    assert!(other.apply(&StateChange::ReturnTimes { counts: vec![0, 1].into() }).is_err());
}
