//! Drain jobs: which objects they move, in which order, and how many at a time.

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{CreateDrainJobRequest, JobStatus};
use mooncake_wire::types::{SegmentStatus, TaskCompletion, TaskStatus, Uuid};
use moongate_master_core::{MasterCoreOptions, MoveRequest};

use crate::harness::{MIB, TestMasterCore, TestReplicateConfig, caller, id};

const FIRST: &str = "10.0.0.1:12000";
const SECOND: &str = "10.0.0.2:12000";

fn on_first() -> TestReplicateConfig {
    TestReplicateConfig { preferred_segment: FIRST, ..TestReplicateConfig::default() }
}

fn start_drain(world: &mut TestMasterCore, concurrency: u32) -> Uuid {
    let request = CreateDrainJobRequest {
        segments: vec![FIRST.to_owned()],
        max_concurrency: Some(concurrency),
        ..CreateDrainJobRequest::default()
    };
    world.master.create_drain_job(world.now, &request, &mut world.changes).unwrap()
}

/// Executes up to 16 tasks of each node, or reports failure if `works` is false. Returns their keys.
fn complete_tasks(world: &mut TestMasterCore, works: bool) -> Vec<String> {
    let mut keys = Vec::new();
    for node in [1, 2, 3] {
        let client = id(100 + node);
        for task in world.master.fetch_tasks(world.now, client, 16, &mut ()) {
            let field = |name: &str| {
                let after = task.payload.split_once(&format!("\"{name}\":\"")).unwrap().1;
                after.split_once('"').unwrap().0.to_owned()
            };
            let (key, source) = (field("key"), field("source"));
            let TestMasterCore { master, now, changes } = world;
            if works {
                master
                    .move_start(
                        caller(*now, client),
                        MoveRequest { key: &key, source: &source, target: &field("target") },
                        changes,
                    )
                    .unwrap();
                master.move_end(caller(*now, client), &key, changes).unwrap();
            }
            let status = if works { TaskStatus::SUCCESS } else { TaskStatus::FAILED };
            let completion = TaskCompletion { id: task.id, status, message: "" };
            master.complete_task(*now, client, &completion, changes).unwrap();
            keys.push(key);
        }
    }
    keys
}

fn drain(works: bool) -> (TestMasterCore, mooncake_wire::admin::DrainJobResponse) {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[8 * MIB, 8 * MIB]);
    for number in 0..10 {
        world.put(&format!("key{number}"), 1000, &on_first()).unwrap();
    }
    let job = start_drain(&mut world, 4);
    assert_eq!(world.master.segment_status(FIRST), Ok(SegmentStatus::DRAINING));
    for _ in 0..20 {
        world.advance_with_heartbeats(1000, &[1, 2]);
        let report = world.master.drain_job(job).unwrap();
        assert!(report.active_units <= 4);
        complete_tasks(&mut world, works);
    }
    let report = world.master.drain_job(job).unwrap();
    (world, report)
}

#[test]
fn draining_moves_everything() {
    let (world, job) = drain(true);
    assert_eq!((job.status, job.succeeded_units, job.migrated_bytes), (JobStatus::SUCCEEDED, 10, 10_000));
    assert_eq!(world.master.segment_status(FIRST), Ok(SegmentStatus::DRAINED));
    assert!(world.keys().iter().all(|key| world.segments_of(key) == [SECOND]));
}

#[test]
fn draining_fails_if_objects_cannot_be_moved() {
    let (mut world, job) = drain(false);
    assert_eq!((job.status, job.failed_units, job.succeeded_units), (JobStatus::FAILED, 10, 0));
    assert_eq!(world.keys().len(), 10);
    // A new job for the same segment is allowed.
    let again = CreateDrainJobRequest { segments: vec![FIRST.to_owned()], ..Default::default() };
    let TestMasterCore { master, now, changes } = &mut world;
    assert!(master.create_drain_job(*now, &again, changes).is_ok());
}

#[test]
fn drain_jobs_can_be_canceled() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[8 * MIB, 8 * MIB]);
    world.put("k", 1000, &on_first()).unwrap();
    let TestMasterCore { master, now, changes } = &mut world;
    let request =
        |segment: &str| CreateDrainJobRequest { segments: vec![segment.to_owned()], ..Default::default() };
    assert_eq!(master.create_drain_job(*now, &request("no"), changes), Err(ErrorCode::SEGMENT_NOT_FOUND));
    let job = master.create_drain_job(*now, &request(FIRST), changes).unwrap();
    let twice = master.create_drain_job(*now, &request(FIRST), changes);
    assert_eq!(twice, Err(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS));
    master.tick(*now + 1000, changes);
    assert_eq!(master.drain_job(job).unwrap().active_units, 1);
    master.cancel_drain_job(*now, job, changes).unwrap();
    assert_eq!(master.drain_job(job).unwrap().status, JobStatus::CANCELED);
    assert_eq!(master.segment_status(FIRST), Ok(SegmentStatus::OK));
    assert_eq!(master.fetch_tasks(*now, id(101), 16, &mut ()), []);
    assert!(master.create_drain_job(*now, &request(FIRST), changes).is_ok());
    assert_eq!(master.drain_job(id(1)), Err(ErrorCode::JOB_NOT_FOUND));
}

#[test]
fn a_finished_move_starts_others_before_the_next_tick() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[8 * MIB, 8 * MIB]);
    for number in 0..40 {
        world.put(&format!("key{number}"), 1000, &on_first()).unwrap();
    }
    let job = start_drain(&mut world, 8);
    world.advance_with_heartbeats(10, &[1, 2]);
    let mut moved = Vec::new();
    for _ in 0..5 {
        let batch = complete_tasks(&mut world, true);
        assert_eq!(batch.len(), 8, "as many as may be moved at a time");
        moved.extend(batch);
    }
    moved.sort();
    moved.dedup();
    assert_eq!((moved.len(), world.master.drain_job(job).unwrap().succeeded_units), (40, 40));
    assert!(world.keys().iter().all(|key| world.segments_of(key) == [SECOND]));
}

#[test]
fn sole_copies_are_moved_first() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[8 * MIB, 8 * MIB, 8 * MIB]);
    let two = TestReplicateConfig { replica_num: 2, ..on_first() };
    for number in 0..40 {
        let replicas = if number % 2 == 0 { &two } else { &on_first() };
        world.put(&format!("key{number}"), 1000, replicas).unwrap();
    }
    let drained: Vec<String> =
        world.keys().into_iter().filter(|key| world.segments_of(key).contains(&FIRST.to_owned())).collect();
    let is_sole = |world: &TestMasterCore, key: &String| world.segments_of(key).len() == 1;
    let sole = drained.iter().filter(|key| is_sole(&world, key)).count();
    assert!(sole >= 20 && drained.len() > sole, "{sole} of {}", drained.len());
    start_drain(&mut world, 4);
    let mut order = Vec::new();
    for _ in 0..30 {
        world.advance_with_heartbeats(1000, &[1, 2, 3]);
        order.extend(complete_tasks(&mut world, true));
    }
    assert_eq!(order.len(), drained.len());
    assert!(order[..sole].iter().all(|key| is_sole(&world, key)), "{order:?}");
    assert!(drained.iter().all(|key| !world.segments_of(key).contains(&FIRST.to_owned())));
}

#[test]
fn a_replica_is_dropped_if_all_other_segments_have_one() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[8 * MIB, 8 * MIB]);
    world.put("k", 1000, &TestReplicateConfig { replica_num: 2, ..TestReplicateConfig::default() }).unwrap();
    assert_eq!(world.segments_of("k").len(), 2);
    let job = start_drain(&mut world, 4);
    for _ in 0..5 {
        world.advance_with_heartbeats(1000, &[1, 2]);
        complete_tasks(&mut world, true);
    }
    assert_eq!(world.master.drain_job(job).unwrap().status, JobStatus::SUCCEEDED);
    assert_eq!(world.segments_of("k"), [SECOND]);
}
