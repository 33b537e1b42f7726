//! Writing.

use mooncake_wire::types::ReplicaType;

use super::serve;

serve! {
    PutStart(call, it) => {
        call.core.put_start(call.now_ms, it.client_id, it.tenant, it.key, it.size, &it.config, call.fx)
    },
    BatchPutStart(call, it) => {
        let (keys, sizes) = (&it.keys, &it.sizes);
        call.core.batch_put_start(call.now_ms, it.client_id, it.tenant, keys, sizes, &it.config, call.fx)
    },
    PutEnd(call, it) => {
        call.core.put_end(call.now_ms, it.client_id, it.tenant, &it.object, it.replica_type, call.fx)
    },
    BatchPutEnd(call, it) => {
        call.core.batch_put_end(call.now_ms, it.client_id, it.tenant, &it.objects, it.replica_type, call.fx)
    },
    PutRevoke(call, it) => call.core.put_revoke(it.client_id, it.tenant, it.key, it.replica_type, call.fx),
    BatchPutRevoke(call, it) => {
        call.core.batch_put_revoke(it.client_id, it.tenant, &it.keys, it.replica_type, call.fx)
    },
    UpsertStart(call, it) => {
        call.core.upsert_start(call.now_ms, it.client_id, it.tenant, it.key, it.size, &it.config, call.fx)
    },
    BatchUpsertStart(call, it) => {
        let (keys, sizes) = (&it.keys, &it.sizes);
        call.core.batch_upsert_start(call.now_ms, it.client_id, it.tenant, keys, sizes, &it.config, call.fx)
    },
    UpsertEnd(call, it) => {
        call.core.put_end(call.now_ms, it.client_id, it.tenant, &it.object, it.replica_type, call.fx)
    },
    BatchUpsertEnd(call, it) => {
        call.core.batch_put_end(call.now_ms, it.client_id, it.tenant, &it.objects, ReplicaType::ALL, call.fx)
    },
    UpsertRevoke(call, it) => call.core.put_revoke(it.client_id, it.tenant, it.key, it.replica_type, call.fx),
    BatchUpsertRevoke(call, it) => {
        call.core.batch_put_revoke(it.client_id, it.tenant, &it.keys, ReplicaType::ALL, call.fx)
    },
}
