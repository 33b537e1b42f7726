//! Admin requests that Mooncake's admin server does not have.

use std::borrow::Cow;
use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::Response;
use mooncake_wire::admin::{AdminBufferDescriptor, LocalDiskObject};
use mooncake_wire::events::mooncake::DEFAULT_TENANT;
use serde::Serialize;

use super::objects::{in_memory, on_disks};
use super::{AdminContext, SharedAdminContext, response};
use crate::query_string::QueryString;

#[derive(Serialize)]
struct PeekKeyResult<'a> {
    ok: bool,
    error: Option<&'static str>,
    replicas: Vec<AdminBufferDescriptor<'a>>,
    /// Omitted if the object is on no disk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    disks: Vec<LocalDiskObject>,
}

#[derive(Serialize)]
struct PeekResponse<'a> {
    success: bool,
    data: BTreeMap<&'a str, PeekKeyResult<'a>>,
    /// Segments whose node is silent: their replicas are omitted, and an object without other replicas is not found.
    silent_segments: Vec<String>,
}

/// Locations of objects of any tenant, without granting a lease.
pub(super) async fn peek(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let Some(keys) = query.decoded("keys") else {
        return response::invalid("No keys provided. Use ?keys=key1,key2,...");
    };
    peek_keys(&admin, &query, &keys.split(',').collect::<Vec<_>>())
}

/// [`peek`] for more keys than fit into a URL: one key per line of the body, not percent-encoded.
pub(super) async fn peek_lines(
    State(admin): SharedAdminContext,
    query: QueryString,
    keys: String,
) -> Response {
    peek_keys(&admin, &query, &keys.lines().collect::<Vec<_>>())
}

fn peek_keys(admin: &AdminContext, query: &QueryString, keys: &[&str]) -> Response {
    let tenant = query.decoded("tenant_id").unwrap_or(Cow::Borrowed(DEFAULT_TENANT));
    let master = &admin.server.master;
    let results = master.peek(&tenant, keys);
    let mut data = BTreeMap::new();
    for (key, result) in keys.iter().zip(&results) {
        let peeked = match result {
            Ok(replicas) => {
                let (disks, replicas) = (on_disks(replicas), in_memory(replicas));
                PeekKeyResult { ok: true, error: None, replicas, disks }
            }
            Err(code) => {
                PeekKeyResult { ok: false, error: code.name(), replicas: Vec::new(), disks: Vec::new() }
            }
        };
        data.insert(*key, peeked);
    }
    let segments = master.segments_detail().segments;
    let silent = segments.into_iter().filter(|segment| master.is_silent(segment.segment_id));
    let silent_segments = silent.map(|segment| segment.segment_name).collect();
    response::ok(&PeekResponse { success: true, data, silent_segments })
}

#[derive(Serialize)]
struct PrefixUsage {
    /// Key prefix up to the first separator; empty for keys without one, null for the sum of all keys without their own entry.
    prefix: Option<Box<str>>,
    keys: u64,
    bytes: u64,
    hits: u64,
}

/// Keys, bytes and reads by key prefix.
pub(super) async fn prefixes(State(admin): SharedAdminContext) -> Response {
    let statistics = admin.server.master.prefix_statistics().into_iter();
    let prefixes: Vec<PrefixUsage> = statistics
        .map(|usage| PrefixUsage {
            prefix: usage.prefix,
            keys: usage.keys,
            bytes: usage.bytes,
            hits: usage.hits,
        })
        .collect();
    response::data(prefixes)
}
