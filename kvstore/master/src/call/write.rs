//! RPCs that write objects.

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use mooncake_wire::types::{ObjectMeta, ReplicaType};
use moongate_master_core::{BatchPutStartRequest, CallContext, PutStartRequest};

use super::{RpcCall, serve};
use crate::upserts::WrittenKey;

fn written<'a>(context: CallContext<'a>, key: &'a str) -> WrittenKey<'a> {
    WrittenKey { client: context.client, tenant: context.tenant, key }
}

impl RpcCall<'_> {
    fn track_put_start<T>(&self, context: CallContext<'_>, key: &str, started: &Result<T, ErrorCode>) {
        if started.is_ok() {
            self.server.upserts.put_started(written(context, key));
        }
    }

    fn track_upsert_start<T>(&self, context: CallContext<'_>, key: &str, started: &Result<T, ErrorCode>) {
        if started.is_ok() {
            let release_ms = self.core.settings().put_release_ms;
            self.server.upserts.begin(self.now_ms, self.connection, written(context, key), release_ms);
        }
    }

    fn end_put(
        &mut self,
        context: CallContext<'_>,
        object: &ObjectMeta<&str>,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        self.server.upserts.check_put(written(context, object.key))?;
        self.core.put_end(context, object, kind, self.effects)
    }

    fn revoke_put(
        &mut self,
        context: CallContext<'_>,
        key: &str,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        self.server.upserts.check_put(written(context, key))?;
        self.core.put_revoke(context, key, kind, self.effects)
    }

    fn end_upsert(
        &mut self,
        context: CallContext<'_>,
        object: &ObjectMeta<&str>,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        let write = written(context, object.key);
        self.server.upserts.check(self.now_ms, self.connection, write)?;
        let ended = self.core.put_end(context, object, kind, self.effects);
        self.server.upserts.finish(write);
        ended
    }

    fn revoke_upsert(
        &mut self,
        context: CallContext<'_>,
        key: &str,
        kind: ReplicaType,
    ) -> Result<(), ErrorCode> {
        let write = written(context, key);
        self.server.upserts.check(self.now_ms, self.connection, write)?;
        let revoked = self.core.put_revoke(context, key, kind, self.effects);
        self.server.upserts.finish(write);
        revoked
    }
}

serve! {
    PutStart(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        let request = PutStartRequest { key: args.key, size: args.size, config: &args.config };
        let started = call.core.put_start(context, &request, call.effects);
        call.track_put_start(context, args.key, &started);
        call.reply.grant(AccessRights::Write, started.iter().flatten());
        started
    },
    BatchPutStart(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        let request = BatchPutStartRequest { keys: &args.keys, sizes: &args.sizes, config: &args.config };
        let all = call.core.batch_put_start(context, &request, call.effects);
        args.keys.iter().zip(&all).for_each(|(key, started)| call.track_put_start(context, key, started));
        call.reply.grant(AccessRights::Write, all.iter().flatten().flatten());
        all
    },
    PutEnd(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        call.end_put(context, &args.object, args.replica_type)
    },
    BatchPutEnd(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        args.objects.iter().map(|object| call.end_put(context, object, args.replica_type)).collect()
    },
    PutRevoke(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        call.revoke_put(context, args.key, args.replica_type)
    },
    BatchPutRevoke(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        args.keys.iter().map(|key| call.revoke_put(context, key, args.replica_type)).collect()
    },
    UpsertStart(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        let request = PutStartRequest { key: args.key, size: args.size, config: &args.config };
        let started = call.core.upsert_start(context, &request, call.effects);
        call.track_upsert_start(context, args.key, &started);
        call.reply.grant(AccessRights::Write, started.iter().flatten());
        started
    },
    BatchUpsertStart(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        let request = BatchPutStartRequest { keys: &args.keys, sizes: &args.sizes, config: &args.config };
        let all = call.core.batch_upsert_start(context, &request, call.effects);
        args.keys.iter().zip(&all).for_each(|(key, started)| call.track_upsert_start(context, key, started));
        call.reply.grant(AccessRights::Write, all.iter().flatten().flatten());
        all
    },
    UpsertEnd(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        call.end_upsert(context, &args.object, args.replica_type)
    },
    BatchUpsertEnd(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        args.objects.iter().map(|object| call.end_upsert(context, object, ReplicaType::ALL)).collect()
    },
    UpsertRevoke(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        call.revoke_upsert(context, args.key, args.replica_type)
    },
    BatchUpsertRevoke(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        args.keys.iter().map(|key| call.revoke_upsert(context, key, ReplicaType::ALL)).collect()
    },
}
