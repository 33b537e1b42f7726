//! RPCs to copy and move replicas, and the tasks for them.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use mooncake_wire::types::{CopyPlan, MovePlan};
use moongate_master_core::{CopyRequest, CopyTaskRequest, DynamicReplicationLease, MoveRequest};

use super::{RpcCall, serve};

impl RpcCall<'_> {
    fn grant_copy(&mut self, started: &Result<CopyPlan<Arc<str>>, ErrorCode>) {
        if let Ok(plan) = started {
            self.reply.grant(AccessRights::Read, [&plan.source]);
            self.reply.grant(AccessRights::Write, &plan.targets);
        }
    }

    fn grant_move(&mut self, started: &Result<MovePlan<Arc<str>>, ErrorCode>) {
        if let Ok(plan) = started {
            self.reply.grant(AccessRights::Read, [&plan.source]);
            self.reply.grant(AccessRights::Write, &plan.target);
        }
    }
}

serve! {
    CopyStart(call, args) => {
        let request = CopyRequest { key: args.key, source: args.source, targets: &args.targets, lease: None };
        let started = call.core.copy_start(call.context(args.client_id, args.tenant), &request, call.effects);
        call.grant_copy(&started);
        started
    },
    DynamicReplicaCopyStart(call, args) => {
        let lease = Some(DynamicReplicationLease { id: args.lease_id, epoch: args.version_epoch });
        let request = CopyRequest { key: args.key, source: args.source, targets: &args.targets, lease };
        let started = call.core.copy_start(call.context(args.client_id, args.tenant), &request, call.effects);
        call.grant_copy(&started);
        started
    },
    CopyEnd(call, args) => call.core.copy_end(call.context(args.client_id, args.tenant), args.key, None, call.effects),
    DynamicReplicaCopyEnd(call, args) => {
        let lease = Some(DynamicReplicationLease { id: args.lease_id, epoch: args.version_epoch });
        call.core.copy_end(call.context(args.client_id, args.tenant), args.key, lease, call.effects)
    },
    CopyRevoke(call, args) => {
        call.core.copy_revoke(call.context(args.client_id, args.tenant), args.key, None, call.effects)
    },
    DynamicReplicaCopyRevoke(call, args) => {
        let lease = Some(DynamicReplicationLease { id: args.lease_id, epoch: args.version_epoch });
        call.core.copy_revoke(call.context(args.client_id, args.tenant), args.key, lease, call.effects)
    },
    MoveStart(call, args) => {
        let request = MoveRequest { key: args.key, source: args.source, target: args.target };
        let started = call.core.move_start(call.context(args.client_id, args.tenant), request, call.effects);
        call.grant_move(&started);
        started
    },
    MoveEnd(call, args) => call.core.move_end(call.context(args.client_id, args.tenant), args.key, call.effects),
    MoveRevoke(call, args) => call.core.move_revoke(call.context(args.client_id, args.tenant), args.key, call.effects),
    CreateCopyTask(call, args) => {
        let request = CopyTaskRequest { key: args.key, targets: &args.targets };
        call.core.create_copy_task(call.now_ms, args.tenant, &request, call.effects)
    },
    CreateMoveTask(call, args) => {
        let request = MoveRequest { key: args.key, source: args.source, target: args.target };
        call.core.create_move_task(call.now_ms, args.tenant, request, call.effects)
    },
    QueryTask[String](call, args) => call.core.query_task(args.task_id),
    FetchTasks[String](call, args) => Ok(call.core.fetch_tasks(call.now_ms, args.client_id, args.limit, call.effects)),
    MarkTaskToComplete(call, args) => call.core.complete_task(call.now_ms, args.client_id, &args.completion, call.effects),
}
