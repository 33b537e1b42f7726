//! Copies and moves of replicas, and the tasks to make them.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use mooncake_wire::types::{CopyPlan, MovePlan, Uuid};
use moongate_master_core::ClientObjectKey;

use super::{RpcCall, serve};

fn work<'a>(client: Uuid, tenant: &'a str, key: &'a str) -> ClientObjectKey<'a> {
    ClientObjectKey { client, tenant, key }
}

impl RpcCall<'_> {
    fn grant_copy(&mut self, started: &Result<CopyPlan<Arc<str>>, ErrorCode>) {
        if let Ok(plan) = started {
            self.grant(AccessRights::Read, [&plan.source]);
            self.grant(AccessRights::Write, &plan.targets);
        }
    }

    fn grant_move(&mut self, started: &Result<MovePlan<Arc<str>>, ErrorCode>) {
        if let Ok(plan) = started {
            self.grant(AccessRights::Read, [&plan.source]);
            self.grant(AccessRights::Write, &plan.target);
        }
    }
}

serve! {
    CopyStart(call, it) => {
        let work = work(it.client_id, it.tenant, it.key);
        let started = call.core.copy_start(call.now_ms, work, it.source, &it.targets, None, call.effects);
        call.grant_copy(&started);
        started
    },
    DynamicReplicaCopyStart(call, it) => {
        let (work, plan) = (work(it.client_id, it.tenant, it.key), (it.lease_id, it.version_epoch));
        let started = call.core.copy_start(call.now_ms, work, it.source, &it.targets, Some(plan), call.effects);
        call.grant_copy(&started);
        started
    },
    CopyEnd(call, it) => call.core.copy_end(call.now_ms, work(it.client_id, it.tenant, it.key), None, call.effects),
    DynamicReplicaCopyEnd(call, it) => {
        let (work, plan) = (work(it.client_id, it.tenant, it.key), (it.lease_id, it.version_epoch));
        call.core.copy_end(call.now_ms, work, Some(plan), call.effects)
    },
    CopyRevoke(call, it) => {
        call.core.copy_revoke(call.now_ms, work(it.client_id, it.tenant, it.key), None, call.effects)
    },
    DynamicReplicaCopyRevoke(call, it) => {
        let (work, plan) = (work(it.client_id, it.tenant, it.key), (it.lease_id, it.version_epoch));
        call.core.copy_revoke(call.now_ms, work, Some(plan), call.effects)
    },
    MoveStart(call, it) => {
        let work = work(it.client_id, it.tenant, it.key);
        let started = call.core.move_start(call.now_ms, work, it.source, it.target, call.effects);
        call.grant_move(&started);
        started
    },
    MoveEnd(call, it) => call.core.move_end(call.now_ms, work(it.client_id, it.tenant, it.key), call.effects),
    MoveRevoke(call, it) => call.core.move_revoke(call.now_ms, work(it.client_id, it.tenant, it.key), call.effects),
    CreateCopyTask(call, it) => call.core.create_copy_task(call.now_ms, it.tenant, it.key, &it.targets, call.effects),
    CreateMoveTask(call, it) => {
        call.core.create_move_task(call.now_ms, it.tenant, it.key, it.source, it.target, call.effects)
    },
    QueryTask[String](call, it) => call.core.query_task(it.task_id),
    FetchTasks[String](call, it) => Ok(call.core.fetch_tasks(call.now_ms, it.client_id, it.limit, call.effects)),
    MarkTaskToComplete(call, it) => call.core.complete_task(call.now_ms, it.client_id, &it.completion, call.effects),
}
