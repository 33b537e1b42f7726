//! Copies, moves and tasks.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{TaskCompletion, TaskStatus, TaskType};
use moongate_master_core::{
    CallContext, CopyRequest, CopyTaskRequest, DynamicReplicationLease, DynamicReplicationMode,
    MasterCoreOptions, MoveRequest, RemoveContext,
};

use crate::harness::{MIB, TENANT, TestMasterCore, TestReplicateConfig, caller, client_segment, id};

const FIRST: &str = "10.0.0.1:12000";
const SECOND: &str = "10.0.0.2:12000";

fn on_first() -> TestReplicateConfig {
    TestReplicateConfig { preferred_segment: FIRST, ..TestReplicateConfig::default() }
}

fn worker(now_ms: u64) -> CallContext<'static> {
    caller(now_ms, id(101))
}

fn world() -> TestMasterCore {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[8 * MIB, 8 * MIB]);
    world.put("k", 1000, &on_first()).unwrap();
    world
}

#[test]
fn a_copy_adds_a_replica() {
    let mut world = world();
    let TestMasterCore { master, now, changes } = &mut world;
    assert_eq!(master.copy_end(worker(*now), "k", None, changes), Err(ErrorCode::OBJECT_NO_REPLICATION_TASK));
    let start = |key, source, target: &str, changes: &mut Vec<_>| {
        master.copy_start(
            worker(*now),
            &CopyRequest { key, source, targets: &[target], lease: None },
            changes,
        )
    };
    assert_eq!(start("l", FIRST, SECOND, changes), Err(ErrorCode::OBJECT_NOT_FOUND));
    assert_eq!(start("k", SECOND, FIRST, changes), Err(ErrorCode::REPLICA_NOT_FOUND));
    assert_eq!(start("k", FIRST, "unknown", changes), Err(ErrorCode::SEGMENT_NOT_FOUND));
    assert_eq!(start("l", FIRST, "unknown", changes), Err(ErrorCode::SEGMENT_NOT_FOUND));
    let plan = start("k", FIRST, SECOND, changes).unwrap();
    assert_eq!(plan.targets.len(), 1);
    assert_eq!(start("k", FIRST, SECOND, changes), Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK));
    assert_eq!(
        master.remove(RemoveContext { now_ms: *now, tenant: TENANT, force: true }, "k", changes),
        Err(ErrorCode::REPLICA_IS_NOT_READY)
    );
    assert_eq!(master.move_end(worker(*now), "k", changes), Err(ErrorCode::INVALID_PARAMS));
    assert_eq!(master.copy_end(caller(*now, id(9)), "k", None, changes), Err(ErrorCode::ILLEGAL_CLIENT));
    assert_eq!(master.peek(TENANT, &["k"])[0].as_ref().unwrap().len(), 1);
    master.copy_end(worker(*now), "k", None, changes).unwrap();
    assert_eq!(world.segments_of("k"), [FIRST, SECOND]);
    world.remove("k").unwrap();
    assert_eq!(world.used(), 0);
}

#[test]
fn a_revoked_or_timed_out_copy_frees_its_space() {
    let mut world = world();
    let TestMasterCore { master, now, changes } = &mut world;
    master
        .copy_start(
            worker(*now),
            &CopyRequest { key: "k", source: FIRST, targets: &[SECOND], lease: None },
            changes,
        )
        .unwrap();
    master.copy_revoke(worker(*now), "k", None, changes).unwrap();
    assert_eq!(master.space_usage().used, 1000);
    master
        .copy_start(
            worker(*now),
            &CopyRequest { key: "k", source: FIRST, targets: &[SECOND], lease: None },
            changes,
        )
        .unwrap();
    assert_eq!(master.space_usage().used, 2000);
    world.advance_with_heartbeats(600_000, &[1, 2]);
    assert_eq!((world.used(), world.segments_of("k")), (1000, vec![FIRST.to_owned()]));
}

#[test]
fn a_move_frees_the_source_after_its_lease() {
    let mut world = world();
    assert!(world.exists("k"));
    let TestMasterCore { master, now, changes } = &mut world;
    assert_eq!(
        master.move_start(worker(*now), MoveRequest { key: "k", source: FIRST, target: FIRST }, changes),
        Err(ErrorCode::INVALID_PARAMS)
    );
    assert!(
        master
            .move_start(worker(*now), MoveRequest { key: "k", source: FIRST, target: SECOND }, changes)
            .unwrap()
            .target
            .is_some()
    );
    master.move_end(worker(*now), "k", changes).unwrap();
    assert_eq!((world.segments_of("k"), world.used()), (vec![SECOND.to_owned()], 2000));
    world.advance_with_heartbeats(10_000, &[1, 2]);
    assert_eq!(world.used(), 1000);
}

#[test]
fn unmounting_a_segment_ends_its_copies() {
    for unmounted in [1, 2] {
        let mut world = world();
        let TestMasterCore { master, now, changes } = &mut world;
        master
            .copy_start(
                worker(*now),
                &CopyRequest { key: "k", source: FIRST, targets: &[SECOND], lease: None },
                changes,
            )
            .unwrap();
        master.unmount(*now, client_segment(id(unmounted), id(100 + unmounted)), changes).unwrap();
        assert_eq!(world.has("k"), unmounted == 2);
        assert_eq!(world.used(), if unmounted == 2 { 1000 } else { 0 });
    }
}

#[test]
fn tasks_are_fetched_completed_and_queryable() {
    let mut world = world();
    let TestMasterCore { master, now, .. } = &mut world;
    let missing =
        master.create_copy_task(*now, TENANT, &CopyTaskRequest { key: "l", targets: &[SECOND] }, &mut ());
    assert_eq!(missing, Err(ErrorCode::OBJECT_NOT_FOUND));
    assert_eq!(
        master.create_copy_task(*now, TENANT, &CopyTaskRequest { key: "k", targets: &["no"] }, &mut ()),
        Err(ErrorCode::INVALID_PARAMS)
    );
    assert_eq!(
        master.create_move_task(
            *now,
            TENANT,
            MoveRequest { key: "l", source: FIRST, target: FIRST },
            &mut ()
        ),
        Err(ErrorCode::INVALID_PARAMS)
    );
    assert_eq!(
        master.create_move_task(
            *now,
            TENANT,
            MoveRequest { key: "k", source: FIRST, target: FIRST },
            &mut ()
        ),
        Err(ErrorCode::INVALID_PARAMS)
    );
    assert_eq!(
        master.create_move_task(*now, TENANT, MoveRequest { key: "k", source: FIRST, target: "no" }, &mut ()),
        Err(ErrorCode::INVALID_PARAMS)
    );
    let copy = master
        .create_copy_task(*now, TENANT, &CopyTaskRequest { key: "k", targets: &[SECOND] }, &mut ())
        .unwrap();
    let moving = master
        .create_move_task(*now, TENANT, MoveRequest { key: "k", source: FIRST, target: SECOND }, &mut ())
        .unwrap();
    assert_eq!(
        master.create_move_task(
            *now,
            TENANT,
            MoveRequest { key: "k", source: SECOND, target: FIRST },
            &mut ()
        ),
        Err(ErrorCode::INVALID_PARAMS)
    );
    assert_eq!(master.fetch_tasks(*now, id(102), 16, &mut ()), []);
    let fetched = master.fetch_tasks(*now, id(101), 16, &mut ());
    assert_eq!(fetched.iter().map(|it| it.id).collect::<Vec<_>>(), [copy, moving]);
    assert_eq!(
        fetched[0].payload,
        r#"{"tenant_id":"default","key":"k","source":"10.0.0.1:12000","targets":["10.0.0.2:12000"],"dynamic_replication_lease_id_high":0,"dynamic_replication_lease_id_low":0,"dynamic_replication_version_epoch":0}"#
    );
    assert_eq!(
        fetched[1].payload,
        r#"{"tenant_id":"default","key":"k","source":"10.0.0.1:12000","target":"10.0.0.2:12000"}"#
    );
    let completion = |id, status| TaskCompletion { id, status, message: "ok" };
    let complete = |client, completion| master.complete_task(*now, client, &completion, &mut ());
    assert_eq!(complete(id(102), completion(copy, TaskStatus::SUCCESS)), Err(ErrorCode::ILLEGAL_CLIENT));
    assert_eq!(complete(id(101), completion(copy, TaskStatus::PENDING)), Err(ErrorCode::INVALID_PARAMS));
    assert_eq!(complete(id(101), completion(id(1), TaskStatus::FAILED)), Err(ErrorCode::TASK_NOT_FOUND));
    assert_eq!(complete(id(101), completion(copy, TaskStatus::SUCCESS)), Ok(()));
    let report = master.query_task(copy).unwrap();
    assert_eq!((report.status, report.task_type), (TaskStatus::SUCCESS, TaskType::REPLICA_COPY));
    world.advance_with_heartbeats(300_000, &[1, 2]);
    let report = world.master.query_task(moving).unwrap();
    assert_eq!((report.status, report.message.as_str()), (TaskStatus::FAILED, "task timed out"));
}

#[test]
fn pending_tasks_are_limited() {
    let settings = MasterCoreOptions { max_tasks: 2, ..MasterCoreOptions::default() };
    let mut world = TestMasterCore::with_segments(settings, &[MIB, MIB]);
    world.put("k", 10, &on_first()).unwrap();
    for _ in 0..2 {
        world
            .master
            .create_copy_task(world.now, TENANT, &CopyTaskRequest { key: "k", targets: &[SECOND] }, &mut ())
            .unwrap();
    }
    let rejected = world.master.create_copy_task(
        world.now,
        TENANT,
        &CopyTaskRequest { key: "k", targets: &[SECOND] },
        &mut (),
    );
    assert_eq!(rejected, Err(ErrorCode::TASK_PENDING_LIMIT_EXCEEDED));
}

#[test]
fn an_object_is_hot_above_the_configured_read_rate() {
    for (mode, planned) in [(DynamicReplicationMode::Observe, 0), (DynamicReplicationMode::Enforce, 1)] {
        let settings = MasterCoreOptions {
            dynamic_replication: mode,
            hot_reads_per_second: 1.5,
            heat_window_ms: 2000,
            max_hot_replicas: 3,
            ..MasterCoreOptions::default()
        };
        let mut world = TestMasterCore::with_segments(settings, &[MIB, MIB, MIB, MIB]);
        world
            .put("a", 100, &TestReplicateConfig { replica_num: 2, ..TestReplicateConfig::default() })
            .unwrap();
        let holders = world.segments_of("a");
        // Below the threshold: two reads per window.
        for _ in 0..20 {
            world.now += 1000;
            world.master.replicas(world.now, TENANT, "a").unwrap();
        }
        assert_eq!(world.master.statistics().hot_keys, 0);
        world.now += 2000;
        for _ in 0..3 {
            world.now += 600;
            world.master.replicas(world.now, TENANT, "a").unwrap();
        }
        assert_eq!(world.master.statistics().hot_keys, 1);
        let tasks = |world: &mut TestMasterCore| -> Vec<String> {
            let nodes = 101..=104;
            nodes
                .flat_map(|node| world.master.fetch_tasks(world.now, id(node), 9, &mut world.changes))
                .map(|it| it.payload)
                .collect()
        };
        let tasks = tasks(&mut world);
        assert_eq!(tasks.len(), planned);
        // Targets exclude segments with a replica.
        let target = |task: &String| task.split("targets").nth(1).unwrap().to_owned();
        assert!(tasks.iter().all(|task| holders.iter().all(|it| !target(task).contains(&**it))), "{tasks:?}");
        // Objects with the maximum number of replicas are not counted.
        world
            .put("b", 100, &TestReplicateConfig { replica_num: 3, ..TestReplicateConfig::default() })
            .unwrap();
        for _ in 0..9 {
            world.master.replicas(world.now, TENANT, "b").unwrap();
        }
        assert_eq!(world.master.statistics().hot_keys, 1);
    }
}

#[test]
fn hot_objects_are_copied() {
    let settings = MasterCoreOptions {
        dynamic_replication: DynamicReplicationMode::Enforce,
        ..MasterCoreOptions::default()
    };
    let mut world = TestMasterCore::with_segments(settings, &[8 * MIB, 8 * MIB]);
    world.put("k", 1000, &on_first()).unwrap();
    for _ in 0..20 {
        world.master.replicas(world.now, TENANT, "k").unwrap();
    }
    assert_eq!(world.master.statistics().hot_keys, 1);
    let tasks = world.master.fetch_tasks(world.now, id(101), 16, &mut ());
    assert_eq!(tasks.len(), 1);
    let number = |name: &str| {
        let after = tasks[0].payload.split_once(&format!("\"{name}\":")).unwrap().1;
        after.split([',', '}']).next().unwrap().parse::<u64>().unwrap()
    };
    let lease_id = mooncake_wire::types::Uuid {
        first: number("dynamic_replication_lease_id_high"),
        second: number("dynamic_replication_lease_id_low"),
    };
    let epoch = number("dynamic_replication_version_epoch");
    let plan = Some(DynamicReplicationLease { id: lease_id, epoch });
    let TestMasterCore { master, now, changes } = &mut world;
    let wrong = master.copy_start(
        worker(*now),
        &CopyRequest {
            key: "k",
            source: FIRST,
            targets: &[SECOND],
            lease: Some(DynamicReplicationLease { id: id(1), epoch: 1 }),
        },
        changes,
    );
    assert_eq!(wrong, Err(ErrorCode::INVALID_PARAMS));
    master
        .copy_start(
            worker(*now),
            &CopyRequest { key: "k", source: FIRST, targets: &[SECOND], lease: plan },
            changes,
        )
        .unwrap();
    assert_eq!(master.copy_end(worker(*now), "k", None, changes), Err(ErrorCode::OBJECT_NO_REPLICATION_TASK));
    master.copy_end(worker(*now), "k", plan, changes).unwrap();
    assert_eq!(world.segments_of("k").len(), 2);
}
