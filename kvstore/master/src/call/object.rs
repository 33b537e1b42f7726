//! RPCs that read or remove objects.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use moongate_master_core::RemoveContext;

use super::serve;

serve! {
    ExistKey(call, args) => Ok(call.core.exist(call.now_ms, args.tenant, args.key)),
    BatchExistKey(call, args) => {
        let mut result = Vec::new();
        call.core.batch_exist(call.now_ms, args.tenant, &args.keys, &mut result);
        result.into_iter().map(Ok).collect()
    },
    ProbeKey(call, args) => Ok(call.core.probe(args.tenant, args.key)),
    BatchProbeKey(call, args) => {
        match call.core.batch_probe(call.now_ms, args.tenant, &args.keys, args.policy) {
            Ok(found) => found.into_iter().map(Ok).collect(),
            Err(code) => args.keys.iter().map(|_| Err(code)).collect(),
        }
    },
    GetReplicaListForAdmin(call, args) => {
        let found = call.core.probe_replicas(args.tenant, &[args.key]).pop();
        let result = found.unwrap_or(Err(ErrorCode::OBJECT_NOT_FOUND));
        call.reply.grant(AccessRights::Read, result.iter().flat_map(|list| &list.replicas));
        result
    },
    BatchGetReplicaListForAdmin(call, args) => {
        let result = call.core.probe_replicas(args.tenant, &args.keys);
        call.reply.grant(AccessRights::Read, result.iter().flatten().flat_map(|list| &list.replicas));
        result
    },
    GetReplicaList(call, args) => {
        let result = call.core.replicas(call.now_ms, args.tenant, args.key);
        call.reply.grant(AccessRights::Read, result.iter().flat_map(|list| &list.replicas));
        result
    },
    BatchGetReplicaList(call, args) => {
        let result = call.core.batch_replicas(call.now_ms, args.tenant, &args.keys);
        call.reply.grant(AccessRights::Read, result.iter().flatten().flat_map(|list| &list.replicas));
        result
    },
    GetReplicaListByRegex(call, args) => {
        let result = call.core.replicas_by_regex(call.now_ms, args.tenant, args.key)?;
        call.reply.grant(AccessRights::Read, result.iter().flat_map(|(_, replicas)| replicas));
        Ok(result.into_iter().map(|(key, replicas)| (Arc::from(key), replicas)).collect())
    },
    Remove(call, args) => {
        let context = RemoveContext { now_ms: call.now_ms, tenant: args.tenant, force: args.force };
        call.core.remove(context, args.key, call.effects)
    },
    BatchRemove(call, args) => {
        let context = RemoveContext { now_ms: call.now_ms, tenant: args.tenant, force: args.force };
        call.core.batch_remove(context, &args.keys, call.effects)
    },
    RemoveByRegex(call, args) => {
        let context = RemoveContext { now_ms: call.now_ms, tenant: args.tenant, force: args.force };
        call.core.remove_by_regex(context, args.key, call.effects)
    },
    RemoveAll(call, args) => call.core.remove_all(call.now_ms, Some(args.tenant), args.force, call.effects),
}
