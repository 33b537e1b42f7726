//! Writing.

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use mooncake_wire::types::{ObjectMeta, ReplicaType, Uuid};

use super::{RpcCall, serve};
use crate::upserts::WrittenKey;

/// Who writes and whose keys, which all keys of a batch have in common.
#[derive(Clone, Copy)]
struct WriterIdentity<'a> {
    client: Uuid,
    tenant: &'a str,
}

impl<'a> WriterIdentity<'a> {
    fn write(self, key: &'a str) -> WrittenKey<'a> {
        WrittenKey { client: self.client, tenant: self.tenant, key }
    }
}

impl RpcCall<'_> {
    fn track_put_start<T>(&self, it: WriterIdentity<'_>, key: &str, started: &Result<T, ErrorCode>) {
        if started.is_ok() {
            self.server.upserts.put_begun(it.write(key));
        }
    }

    fn track_upsert_start<T>(&self, it: WriterIdentity<'_>, key: &str, started: &Result<T, ErrorCode>) {
        if started.is_ok() {
            let release_ms = self.core.settings().put_release_ms;
            self.server.upserts.begin(self.now_ms, self.connection, it.write(key), release_ms);
        }
    }

    fn end_put(
        &mut self,
        it: WriterIdentity<'_>,
        object: &ObjectMeta<&str>,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        self.server.upserts.check_put(it.write(object.key))?;
        self.core.put_end(self.now_ms, it.client, it.tenant, object, kind, self.effects)
    }

    fn revoke_put(&mut self, it: WriterIdentity<'_>, key: &str, kind: ReplicaType) -> Result<(), ErrorCode> {
        self.server.upserts.check_put(it.write(key))?;
        self.core.put_revoke(it.client, it.tenant, key, kind, self.effects)
    }

    fn end_upsert(
        &mut self,
        it: WriterIdentity<'_>,
        object: &ObjectMeta<&str>,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        let write = it.write(object.key);
        self.server.upserts.check(self.now_ms, self.connection, write)?;
        let ended = self.core.put_end(self.now_ms, it.client, it.tenant, object, kind, self.effects);
        self.server.upserts.finish(write);
        ended
    }

    fn revoke_upsert(
        &mut self,
        it: WriterIdentity<'_>,
        key: &str,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        let write = it.write(key);
        self.server.upserts.check(self.now_ms, self.connection, write)?;
        let revoked = self.core.put_revoke(it.client, it.tenant, key, kind, self.effects);
        self.server.upserts.finish(write);
        revoked
    }
}

serve! {
    PutStart(call, it) => {
        let started =
            call.core.put_start(call.now_ms, it.client_id, it.tenant, it.key, it.size, &it.config, call.effects);
        call.track_put_start(WriterIdentity { client: it.client_id, tenant: it.tenant }, it.key, &started);
        call.grant(AccessRights::Write, started.iter().flatten());
        started
    },
    BatchPutStart(call, it) => {
        let (keys, sizes) = (&it.keys, &it.sizes);
        let all =
            call.core.batch_put_start(call.now_ms, it.client_id, it.tenant, keys, sizes, &it.config, call.effects);
        let writer = WriterIdentity { client: it.client_id, tenant: it.tenant };
        keys.iter().zip(&all).for_each(|(key, started)| call.track_put_start(writer, key, started));
        call.grant(AccessRights::Write, all.iter().flatten().flatten());
        all
    },
    PutEnd(call, it) => {
        call.end_put(WriterIdentity { client: it.client_id, tenant: it.tenant }, &it.object, it.replica_type)
    },
    BatchPutEnd(call, it) => {
        let writer = WriterIdentity { client: it.client_id, tenant: it.tenant };
        it.objects.iter().map(|object| call.end_put(writer, object, it.replica_type)).collect()
    },
    PutRevoke(call, it) => {
        call.revoke_put(WriterIdentity { client: it.client_id, tenant: it.tenant }, it.key, it.replica_type)
    },
    BatchPutRevoke(call, it) => {
        let writer = WriterIdentity { client: it.client_id, tenant: it.tenant };
        it.keys.iter().map(|key| call.revoke_put(writer, key, it.replica_type)).collect()
    },
    UpsertStart(call, it) => {
        let started =
            call.core.upsert_start(call.now_ms, it.client_id, it.tenant, it.key, it.size, &it.config, call.effects);
        call.track_upsert_start(WriterIdentity { client: it.client_id, tenant: it.tenant }, it.key, &started);
        call.grant(AccessRights::Write, started.iter().flatten());
        started
    },
    BatchUpsertStart(call, it) => {
        let (keys, sizes) = (&it.keys, &it.sizes);
        let all =
            call.core.batch_upsert_start(call.now_ms, it.client_id, it.tenant, keys, sizes, &it.config, call.effects);
        let writer = WriterIdentity { client: it.client_id, tenant: it.tenant };
        keys.iter().zip(&all).for_each(|(key, started)| call.track_upsert_start(writer, key, started));
        call.grant(AccessRights::Write, all.iter().flatten().flatten());
        all
    },
    UpsertEnd(call, it) => {
        call.end_upsert(WriterIdentity { client: it.client_id, tenant: it.tenant }, &it.object, it.replica_type)
    },
    BatchUpsertEnd(call, it) => {
        let writer = WriterIdentity { client: it.client_id, tenant: it.tenant };
        it.objects.iter().map(|object| call.end_upsert(writer, object, ReplicaType::ALL)).collect()
    },
    UpsertRevoke(call, it) => {
        call.revoke_upsert(WriterIdentity { client: it.client_id, tenant: it.tenant }, it.key, it.replica_type)
    },
    BatchUpsertRevoke(call, it) => {
        let writer = WriterIdentity { client: it.client_id, tenant: it.tenant };
        it.keys.iter().map(|key| call.revoke_upsert(writer, key, ReplicaType::ALL)).collect()
    },
}
