//! Reading and removing.

use std::sync::Arc;

use mooncake_wire::capability::AccessRights;

use super::serve;

serve! {
    ExistKey(call, it) => Ok(call.core.exist(call.now_ms, it.tenant, it.key)),
    BatchExistKey(call, it) => {
        let mut found = Vec::new();
        call.core.batch_exist(call.now_ms, it.tenant, &it.keys, &mut found);
        found.into_iter().map(Ok).collect()
    },
    GetReplicaList(call, it) => {
        let found = call.core.replicas(call.now_ms, it.tenant, it.key);
        call.grant(AccessRights::Read, found.iter().flat_map(|list| &list.replicas));
        found
    },
    BatchGetReplicaList(call, it) => {
        let found = call.core.batch_replicas(call.now_ms, it.tenant, &it.keys);
        call.grant(AccessRights::Read, found.iter().flatten().flat_map(|list| &list.replicas));
        found
    },
    GetReplicaListByRegex(call, it) => {
        let found = call.core.replicas_by_regex(call.now_ms, it.tenant, it.key)?;
        call.grant(AccessRights::Read, found.iter().flat_map(|(_, replicas)| replicas));
        Ok(found.into_iter().map(|(key, replicas)| (Arc::from(key), replicas)).collect())
    },
    Remove(call, it) => call.core.remove(call.now_ms, it.tenant, it.key, it.force, call.effects),
    BatchRemove(call, it) => call.core.batch_remove(call.now_ms, it.tenant, &it.keys, it.force, call.effects),
    RemoveByRegex(call, it) => call.core.remove_by_regex(call.now_ms, it.tenant, it.key, it.force, call.effects),
    RemoveAll(call, it) => call.core.remove_all(call.now_ms, Some(it.tenant), it.force, call.effects),
}
