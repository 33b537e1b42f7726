//! Tenants and their quotas.

use mooncake_wire::ErrorCode;
use moongate_master_core::{CallContext, MasterCore, MasterCoreOptions, PutStartRequest};

use crate::harness::{MIB, TestMasterCore, TestReplicateConfig, WRITER};

fn put(world: &mut TestMasterCore, tenant: &str, key: &str, size: u64) -> Result<(), ErrorCode> {
    let TestMasterCore { master, now, changes } = world;
    master.put_start(
        CallContext { now_ms: *now, client: WRITER, tenant },
        &PutStartRequest { key, size, config: &TestReplicateConfig::default() },
        changes,
    )?;
    let meta = mooncake_wire::types::ObjectMeta { key, object_checksum: None };
    master.put_end(
        CallContext { now_ms: *now, client: WRITER, tenant },
        &meta,
        mooncake_wire::types::ReplicaType::ALL,
        changes,
    )
}

fn world() -> TestMasterCore {
    TestMasterCore::with_segments(
        MasterCoreOptions { multi_tenant: true, ..MasterCoreOptions::default() },
        &[8 * MIB],
    )
}

#[test]
fn tenant_names_are_ignored_without_multi_tenancy() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    put(&mut world, "a", "k", 10).unwrap();
    assert!(world.master.exist(world.now, "b", "k"));
    assert_eq!(world.master.quotas(), Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE));
    let rejected = world.master.set_quota("a", 1, &mut ());
    assert_eq!(rejected, Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE));
}

#[test]
fn tenants_have_namespaces_and_quotas() {
    let mut world = world();
    assert_eq!(put(&mut world, "a", "k", 10), Err(ErrorCode::TENANT_NOT_REGISTERED));
    for (tenant, quota) in [("a", MIB), ("b", 2 * MIB)] {
        world.master.set_quota(tenant, quota, &mut world.changes).unwrap();
    }
    put(&mut world, "a", "k", 10).unwrap();
    assert!(!world.master.exist(world.now, "b", "k"));
    put(&mut world, "b", "k", 20).unwrap();
    assert_eq!(world.master.quota("a").unwrap().charged_bytes, 10);
    assert_eq!(world.master.remove_quota("a", &mut ()), Err(ErrorCode::TENANT_NOT_EMPTY));
    assert_eq!(world.master.remove_all(world.now, Some("a"), true, &mut world.changes), 1);
    assert_eq!(world.master.remove_quota("a", &mut world.changes), Ok(()));
    assert_eq!(world.master.remove_quota("a", &mut world.changes), Err(ErrorCode::OBJECT_NOT_FOUND));
    assert_eq!(world.master.quota("a"), Err(ErrorCode::OBJECT_NOT_FOUND));
    assert_eq!(put(&mut world, "a", "k", 10), Err(ErrorCode::TENANT_NOT_REGISTERED));
    assert!(world.master.exist(world.now, "b", "k"));
    for wrong in [0, 1 << 63] {
        assert_eq!(world.master.set_quota("c", wrong, &mut ()), Err(ErrorCode::INVALID_PARAMS));
    }
}

#[test]
fn effective_quotas_are_zero_without_segments() {
    let mut world =
        TestMasterCore::new(MasterCoreOptions { multi_tenant: true, ..MasterCoreOptions::default() });
    let quota = world.master.set_quota("a", MIB, &mut world.changes).unwrap();
    assert_eq!((quota.requested_quota_bytes, quota.effective_quota_bytes), (MIB, 0));
    world.mount(1, 8 * MIB).unwrap();
    assert_eq!(world.master.quota("a").unwrap().effective_quota_bytes, MIB);
}

#[test]
fn a_full_quota_evicts_the_tenants_own_objects() {
    let mut world = world();
    for tenant in ["a", "b"] {
        world.master.set_quota(tenant, MIB, &mut world.changes).unwrap();
    }
    for number in 0..4 {
        put(&mut world, "b", &format!("key{number}"), MIB / 4).unwrap();
    }
    for number in 0..20 {
        put(&mut world, "a", &format!("key{number}"), MIB / 4).unwrap();
    }
    assert_eq!(world.master.quota("a").unwrap().charged_bytes, MIB);
    assert_eq!(world.master.quota("b").unwrap().charged_bytes, MIB);
    assert_eq!(put(&mut world, "a", "large", 2 * MIB), Err(ErrorCode::TENANT_QUOTA_EXCEEDED));
    for number in 0..20 {
        let _ = world.master.exist(world.now, "a", &format!("key{number}"));
    }
    // The remaining objects are leased, and were not evicted for the large one.
    assert_eq!(put(&mut world, "a", "one", MIB / 2), Err(ErrorCode::TENANT_QUOTA_EXCEEDED));
    world.now += MasterCoreOptions::default().lease_ttl_ms;
    put(&mut world, "a", "one", MIB / 2).unwrap();
    assert!(world.master.exist(world.now, "a", "one"));
    assert_eq!(put(&mut world, "a", "more", MIB), Err(ErrorCode::TENANT_QUOTA_EXCEEDED));
}

#[test]
fn nothing_is_evicted_for_an_object_larger_than_the_quota() {
    let mut world = world();
    world.master.set_quota("a", MIB, &mut world.changes).unwrap();
    put(&mut world, "a", "small", MIB / 2).unwrap();
    assert_eq!(put(&mut world, "a", "large", MIB + 1), Err(ErrorCode::TENANT_QUOTA_EXCEEDED));
    assert!(world.master.exist(world.now, "a", "small"));
}

#[test]
fn quotas_are_scaled_to_the_capacity() {
    let world = world();
    for (tenant, quota) in [("a", 8 * MIB), ("b", 24 * MIB)] {
        world.master.set_quota(tenant, quota, &mut ()).unwrap();
    }
    let effective = |master: &MasterCore| {
        let quotas = master.quotas().unwrap();
        quotas.iter().map(|it| it.effective_quota_bytes).collect::<Vec<_>>()
    };
    assert_eq!(effective(&world.master), [2 * MIB, 6 * MIB]);
    let mut world = world;
    world.mount(2, 100 * MIB).unwrap();
    assert_eq!(effective(&world.master), [8 * MIB, 24 * MIB]);
    // The second node expires.
    world.advance_with_heartbeats(80_000, &[1]);
    assert_eq!(effective(&world.master), [2 * MIB, 6 * MIB]);
}
