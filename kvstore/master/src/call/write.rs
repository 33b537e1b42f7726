//! RPCs that write objects.

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use mooncake_wire::types::{ObjectMeta, ReplicaType, Uuid};

use super::{RpcCall, serve};
use crate::upserts::WrittenKey;

/// The writer and the tenant, shared by all keys of a batch.
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
    fn track_put_start<T>(&self, writer: WriterIdentity<'_>, key: &str, started: &Result<T, ErrorCode>) {
        if started.is_ok() {
            self.server.upserts.put_started(writer.write(key));
        }
    }

    fn track_upsert_start<T>(&self, writer: WriterIdentity<'_>, key: &str, started: &Result<T, ErrorCode>) {
        if started.is_ok() {
            let release_ms = self.core.settings().put_release_ms;
            self.server.upserts.begin(self.now_ms, self.connection, writer.write(key), release_ms);
        }
    }

    fn end_put(
        &mut self,
        writer: WriterIdentity<'_>,
        object: &ObjectMeta<&str>,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        self.server.upserts.check_put(writer.write(object.key))?;
        self.core.put_end(self.now_ms, writer.client, writer.tenant, object, kind, self.effects)
    }

    fn revoke_put(
        &mut self,
        writer: WriterIdentity<'_>,
        key: &str,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        self.server.upserts.check_put(writer.write(key))?;
        self.core.put_revoke(writer.client, writer.tenant, key, kind, self.effects)
    }

    fn end_upsert(
        &mut self,
        writer: WriterIdentity<'_>,
        object: &ObjectMeta<&str>,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        let write = writer.write(object.key);
        self.server.upserts.check(self.now_ms, self.connection, write)?;
        let ended = self.core.put_end(self.now_ms, writer.client, writer.tenant, object, kind, self.effects);
        self.server.upserts.finish(write);
        ended
    }

    fn revoke_upsert(
        &mut self,
        writer: WriterIdentity<'_>,
        key: &str,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        let write = writer.write(key);
        self.server.upserts.check(self.now_ms, self.connection, write)?;
        let revoked = self.core.put_revoke(writer.client, writer.tenant, key, kind, self.effects);
        self.server.upserts.finish(write);
        revoked
    }
}

serve! {
    PutStart(call, args) => {
        let started =
            call.core.put_start(call.now_ms, args.client_id, args.tenant, args.key, args.size, &args.config, call.effects);
        call.track_put_start(WriterIdentity { client: args.client_id, tenant: args.tenant }, args.key, &started);
        call.grant(AccessRights::Write, started.iter().flatten());
        started
    },
    BatchPutStart(call, args) => {
        let (keys, sizes) = (&args.keys, &args.sizes);
        let all =
            call.core.batch_put_start(call.now_ms, args.client_id, args.tenant, keys, sizes, &args.config, call.effects);
        let writer = WriterIdentity { client: args.client_id, tenant: args.tenant };
        keys.iter().zip(&all).for_each(|(key, started)| call.track_put_start(writer, key, started));
        call.grant(AccessRights::Write, all.iter().flatten().flatten());
        all
    },
    PutEnd(call, args) => {
        call.end_put(WriterIdentity { client: args.client_id, tenant: args.tenant }, &args.object, args.replica_type)
    },
    BatchPutEnd(call, args) => {
        let writer = WriterIdentity { client: args.client_id, tenant: args.tenant };
        args.objects.iter().map(|object| call.end_put(writer, object, args.replica_type)).collect()
    },
    PutRevoke(call, args) => {
        call.revoke_put(WriterIdentity { client: args.client_id, tenant: args.tenant }, args.key, args.replica_type)
    },
    BatchPutRevoke(call, args) => {
        let writer = WriterIdentity { client: args.client_id, tenant: args.tenant };
        args.keys.iter().map(|key| call.revoke_put(writer, key, args.replica_type)).collect()
    },
    UpsertStart(call, args) => {
        let started =
            call.core.upsert_start(call.now_ms, args.client_id, args.tenant, args.key, args.size, &args.config, call.effects);
        call.track_upsert_start(WriterIdentity { client: args.client_id, tenant: args.tenant }, args.key, &started);
        call.grant(AccessRights::Write, started.iter().flatten());
        started
    },
    BatchUpsertStart(call, args) => {
        let (keys, sizes) = (&args.keys, &args.sizes);
        let all =
            call.core.batch_upsert_start(call.now_ms, args.client_id, args.tenant, keys, sizes, &args.config, call.effects);
        let writer = WriterIdentity { client: args.client_id, tenant: args.tenant };
        keys.iter().zip(&all).for_each(|(key, started)| call.track_upsert_start(writer, key, started));
        call.grant(AccessRights::Write, all.iter().flatten().flatten());
        all
    },
    UpsertEnd(call, args) => {
        call.end_upsert(WriterIdentity { client: args.client_id, tenant: args.tenant }, &args.object, args.replica_type)
    },
    BatchUpsertEnd(call, args) => {
        let writer = WriterIdentity { client: args.client_id, tenant: args.tenant };
        args.objects.iter().map(|object| call.end_upsert(writer, object, ReplicaType::ALL)).collect()
    },
    UpsertRevoke(call, args) => {
        call.revoke_upsert(WriterIdentity { client: args.client_id, tenant: args.tenant }, args.key, args.replica_type)
    },
    BatchUpsertRevoke(call, args) => {
        let writer = WriterIdentity { client: args.client_id, tenant: args.tenant };
        args.keys.iter().map(|key| call.revoke_upsert(writer, key, ReplicaType::ALL)).collect()
    },
}
