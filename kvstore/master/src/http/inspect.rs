//! What Mooncake's admin server does not tell.

use std::borrow::Cow;
use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::Response;
use mooncake_wire::admin::{Buffer, LocalDisk};
use mooncake_wire::events::mooncake::DEFAULT_TENANT;
use serde::Serialize;

use super::objects::{in_memory, on_disks};
use super::{Admin, Query, Shared, answer};

#[derive(Serialize)]
struct Peeked<'a> {
    ok: bool,
    error: Option<&'static str>,
    replicas: Vec<Buffer<'a>>,
    /// Only there if it is on a disk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    disks: Vec<LocalDisk>,
}

#[derive(Serialize)]
struct Peek<'a> {
    success: bool,
    data: BTreeMap<&'a str, Peeked<'a>>,
    /// Segments whose node is not heard of: their replicas are left out, and an object that has no others is not found.
    silent_segments: Vec<String>,
}

/// Where objects are, of any tenant. Nothing is leased.
pub(super) async fn peek(State(admin): Shared, query: Query) -> Response {
    let Some(keys) = query.decoded("keys") else {
        return answer::invalid("No keys provided. Use ?keys=key1,key2,...");
    };
    look(&admin, &query, &keys.split(',').collect::<Vec<_>>())
}

/// The same for more keys than fit into a path: a line of the body each, as they are.
pub(super) async fn peek_lines(State(admin): Shared, query: Query, keys: String) -> Response {
    look(&admin, &query, &keys.lines().collect::<Vec<_>>())
}

fn look(admin: &Admin, query: &Query, keys: &[&str]) -> Response {
    let tenant = query.decoded("tenant_id").unwrap_or(Cow::Borrowed(DEFAULT_TENANT));
    let master = &admin.server.master;
    let found = master.peek(&tenant, keys);
    let mut data = BTreeMap::new();
    for (key, found) in keys.iter().zip(&found) {
        let peeked = match found {
            Ok(replicas) => {
                let (disks, replicas) = (on_disks(replicas), in_memory(replicas));
                Peeked { ok: true, error: None, replicas, disks }
            }
            Err(code) => Peeked { ok: false, error: code.name(), replicas: Vec::new(), disks: Vec::new() },
        };
        data.insert(*key, peeked);
    }
    let segments = master.segments_detail().segments;
    let silent = segments.into_iter().filter(|it| master.is_silent(it.segment_id));
    let silent_segments = silent.map(|it| it.segment_name).collect();
    answer::done(&Peek { success: true, data, silent_segments })
}

#[derive(Serialize)]
struct Prefix {
    /// The beginning of the keys up to the first separator; empty for keys without one, null for all that are not told apart.
    prefix: Option<Box<str>>,
    keys: u64,
    bytes: u64,
    hits: u64,
}

/// Keys, bytes and reads by the beginnings of keys.
pub(super) async fn prefixes(State(admin): Shared) -> Response {
    let statistics = admin.server.master.prefix_statistics().into_iter();
    let prefixes: Vec<Prefix> = statistics
        .map(|it| Prefix { prefix: it.prefix, keys: it.keys, bytes: it.bytes, hits: it.hits })
        .collect();
    answer::data(prefixes)
}
