//! Copies, moves, tasks and drain jobs continue in a master that replays state changes.

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::CreateDrainJobRequest;
use mooncake_wire::types::{TaskCompletion, TaskStatus, Uuid};
use moongate_master_core::{
    CopyRequest, CopyTaskRequest, MasterCoreOptions, MoveRequest, RemoveContext, SnapshotCursor, StateChange,
};
use proptest::prelude::*;

use crate::harness::{
    MIB, TENANT, TestMasterCore, TestReplicateConfig, caller, client_segment, comparable_state, id, replayed,
    snapshot,
};

const NODES: u64 = 3;
const KEYS: u64 = 5;

fn endpoint(node: u64) -> &'static str {
    ["10.0.0.1:12000", "10.0.0.2:12000", "10.0.0.3:12000"][(node % NODES) as usize]
}

fn settings() -> MasterCoreOptions {
    MasterCoreOptions {
        shards: 4,
        max_tasks: 6,
        task_timeout_ms: 5000,
        put_release_ms: 7000,
        ..MasterCoreOptions::default()
    }
}

type ReplayStep = (u8, u64, u64);

fn step() -> impl Strategy<Value = ReplayStep> {
    (0..16_u8, 0..30_u64, 0..30_u64)
}

/// Runs a step and returns its formatted result. Adds ids of created tasks and jobs to `ids`.
fn run_step(world: &mut TestMasterCore, (kind, a, b): ReplayStep, ids: &mut Vec<Uuid>) -> String {
    let key = format!("k{}", a % KEYS);
    let (client, source, target) = (id(101 + b % NODES), endpoint(a / KEYS), endpoint(b));
    let known_id = ids.get(b as usize % ids.len().max(1)).copied().unwrap_or(id(1));
    let preferred = TestReplicateConfig { preferred_segment: source, ..TestReplicateConfig::default() };
    let TestMasterCore { master, now, changes } = world;
    let mut created = |created: Result<Uuid, ErrorCode>| {
        ids.extend(created.ok());
        format!("{:?}", created.map(drop))
    };
    match kind {
        0 | 1 => format!("{:?}", world.put(&key, 1000, &preferred)),
        2 => format!(
            "{:?}",
            master.copy_start(
                caller(*now, client),
                &CopyRequest { key: &key, source, targets: &[target], lease: None },
                changes
            )
        ),
        3 => format!("{:?}", master.copy_end(caller(*now, client), &key, None, changes)),
        4 => format!("{:?}", master.copy_revoke(caller(*now, client), &key, None, changes)),
        5 => format!(
            "{:?}",
            master.move_start(caller(*now, client), MoveRequest { key: &key, source, target }, changes)
        ),
        6 => format!("{:?}", master.move_end(caller(*now, client), &key, changes)),
        7 => created(master.create_copy_task(
            *now,
            TENANT,
            &CopyTaskRequest { key: &key, targets: &[target] },
            changes,
        )),
        8 => {
            created(master.create_move_task(*now, TENANT, MoveRequest { key: &key, source, target }, changes))
        }
        9 => format!("{:?}", master.fetch_tasks(*now, client, 1 + b % 3, changes)),
        10 => {
            let status = if a % 2 == 0 { TaskStatus::SUCCESS } else { TaskStatus::FAILED };
            let completion = TaskCompletion { id: known_id, status, message: "finished" };
            let completed = master.complete_task(*now, client, &completion, changes);
            format!("{completed:?} {:?}", master.query_task(known_id))
        }
        11 => {
            let request = CreateDrainJobRequest {
                segments: vec![source.to_owned()],
                ..CreateDrainJobRequest::default()
            };
            created(master.create_drain_job(*now, &request, changes))
        }
        12 => {
            let canceled = (a % 3 == 0).then(|| master.cancel_drain_job(*now, known_id, changes));
            format!("{canceled:?} {:?}", master.drain_job(known_id))
        }
        13 => format!(
            "{:?}",
            master.remove(RemoveContext { now_ms: *now, tenant: TENANT, force: true }, &key, changes)
        ),
        14 if a % 8 == 0 => {
            let node = b % NODES + 1;
            let unmounted = master.unmount(*now, client_segment(id(node), id(100 + node)), changes);
            format!("{unmounted:?} {:?}", world.mount(node, MIB))
        }
        _ => {
            world.advance_with_heartbeats(a * 50, &[1, 2, 3]);
            String::new()
        }
    }
}

/// A master that has applied these state changes.
fn standby(world: &TestMasterCore, changes: &[StateChange<'static>]) -> TestMasterCore {
    let master = replayed(&settings(), changes, world.now);
    TestMasterCore { master, now: world.now, changes: Vec::new() }
}

proptest! {
    #[test]
    fn tasks_continue_after_replay(
        before in prop::collection::vec(step(), 0..120),
        during in prop::collection::vec(step(), 0..40),
        after in prop::collection::vec(step(), 0..60),
    ) {
        let mut world = TestMasterCore::with_segments(settings(), &[MIB; NODES as usize]);
        let mut ids = Vec::new();
        for step in before {
            run_step(&mut world, step, &mut ids);
        }
        prop_assert_eq!(comparable_state(&standby(&world, &world.changes).master), comparable_state(&world.master));
        // A snapshot in parts, interleaved with operations.
        let (from, mut pieces, mut cursor) = (world.changes.len(), Vec::new(), Some(SnapshotCursor::default()));
        let mut steps = during.into_iter();
        while let Some(from) = cursor {
            cursor = world.master.snapshot(from, 2, &mut pieces);
            if let Some(step) = steps.next() {
                run_step(&mut world, step, &mut ids);
            }
        }
        for step in steps {
            run_step(&mut world, step, &mut ids);
        }
        pieces.extend_from_slice(&world.changes[from..]);
        let mut second = standby(&world, &pieces);
        prop_assert_eq!(comparable_state(&second.master), comparable_state(&world.master));
        // A snapshot of a master that has only applied state changes.
        let relayed = moongate_master_core::MasterCore::new(settings());
        pieces.iter().for_each(|change| _ = relayed.apply(change));
        let third = standby(&world, &snapshot(&relayed, 3));
        prop_assert_eq!(comparable_state(&third.master), comparable_state(&world.master));
        // Both return the same results from here on.
        for step in after.into_iter().filter(|(kind, ..)| matches!(kind, 3 | 4 | 6 | 9 | 10 | 12)) {
            let mut other_ids = ids.clone();
            prop_assert_eq!(run_step(&mut second, step, &mut other_ids), run_step(&mut world, step, &mut ids));
        }
    }
}
