//! RPCs to copy and move replicas, and the tasks for them.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use mooncake_wire::types::{CopyPlan, MovePlan, Uuid};
use moongate_master_core::ClientObjectKey;

use super::{RpcCall, serve};

fn object<'a>(client: Uuid, tenant: &'a str, key: &'a str) -> ClientObjectKey<'a> {
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
    CopyStart(call, args) => {
        let object = object(args.client_id, args.tenant, args.key);
        let started = call.core.copy_start(call.now_ms, object, args.source, &args.targets, None, call.effects);
        call.grant_copy(&started);
        started
    },
    DynamicReplicaCopyStart(call, args) => {
        let (object, plan) = (object(args.client_id, args.tenant, args.key), (args.lease_id, args.version_epoch));
        let started = call.core.copy_start(call.now_ms, object, args.source, &args.targets, Some(plan), call.effects);
        call.grant_copy(&started);
        started
    },
    CopyEnd(call, args) => call.core.copy_end(call.now_ms, object(args.client_id, args.tenant, args.key), None, call.effects),
    DynamicReplicaCopyEnd(call, args) => {
        let (object, plan) = (object(args.client_id, args.tenant, args.key), (args.lease_id, args.version_epoch));
        call.core.copy_end(call.now_ms, object, Some(plan), call.effects)
    },
    CopyRevoke(call, args) => {
        call.core.copy_revoke(call.now_ms, object(args.client_id, args.tenant, args.key), None, call.effects)
    },
    DynamicReplicaCopyRevoke(call, args) => {
        let (object, plan) = (object(args.client_id, args.tenant, args.key), (args.lease_id, args.version_epoch));
        call.core.copy_revoke(call.now_ms, object, Some(plan), call.effects)
    },
    MoveStart(call, args) => {
        let object = object(args.client_id, args.tenant, args.key);
        let started = call.core.move_start(call.now_ms, object, args.source, args.target, call.effects);
        call.grant_move(&started);
        started
    },
    MoveEnd(call, args) => call.core.move_end(call.now_ms, object(args.client_id, args.tenant, args.key), call.effects),
    MoveRevoke(call, args) => call.core.move_revoke(call.now_ms, object(args.client_id, args.tenant, args.key), call.effects),
    CreateCopyTask(call, args) => call.core.create_copy_task(call.now_ms, args.tenant, args.key, &args.targets, call.effects),
    CreateMoveTask(call, args) => {
        call.core.create_move_task(call.now_ms, args.tenant, args.key, args.source, args.target, call.effects)
    },
    QueryTask[String](call, args) => call.core.query_task(args.task_id),
    FetchTasks[String](call, args) => Ok(call.core.fetch_tasks(call.now_ms, args.client_id, args.limit, call.effects)),
    MarkTaskToComplete(call, args) => call.core.complete_task(call.now_ms, args.client_id, &args.completion, call.effects),
}
