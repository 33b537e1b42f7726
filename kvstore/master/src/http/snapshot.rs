//! `/api/v1/snapshot`: all objects as JSON lines, consistent with the KV events.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use mooncake_wire::types::Uuid;
use moongate_master_core::{ReplicaLocation, SnapshotCursor, StateChange, StateChangeSink};
use serde::Serialize;

use super::chunked_body::{ChunkedBody, body};
use super::{AdminContext, SharedAdminContext, client_ids, response};

/// Objects that are read under one lock.
const OBJECTS_PER_LOCK: u32 = 512;

/// One line of the snapshot.
#[derive(Serialize)]
#[serde(untagged)]
enum SnapshotLine<'a> {
    /// The first line: the snapshot contains all events up to `event`, and all messages up to `sequence`. It may contain later ones, which
    /// can be applied twice. Both are null if KV events are disabled.
    Begin { sequence: Option<u64>, event: Option<u64> },
    /// A segment, before the first object in it.
    Segment { segment_id: Uuid, segment_name: &'a str, client_id: Uuid, live: bool },
    /// A completely written object.
    Object {
        tenant: &'a str,
        key: &'a str,
        size: u64,
        segments: Vec<&'a str>,
        /// The client that has the object on its disk.
        #[serde(skip_serializing_if = "Option::is_none")]
        disk: Option<Uuid>,
        #[serde(skip_serializing_if = "Option::is_none")]
        group: Option<&'a str>,
    },
    /// The last line, which proves that the snapshot is complete.
    End { objects: u64 },
}

struct ObjectSnapshotBody {
    admin: Arc<AdminContext>,
    cursor: Option<SnapshotCursor>,
    is_started: bool,
    names: HashMap<Uuid, String>,
    objects: u64,
}

fn line(line: &SnapshotLine<'_>, out: &mut Vec<u8>) {
    // Writing to memory does not fail, and serialization of these types does not either.
    if serde_json::to_writer(&mut *out, line).is_ok() {
        out.push(b'\n');
    }
}

/// The objects of one step, collected while their shard is locked.
#[derive(Default)]
struct ObjectFactCollector(Vec<StateChange<'static>>);

impl StateChangeSink for ObjectFactCollector {
    fn record(&mut self, fact: StateChange<'_>) {
        if matches!(fact, StateChange::ObjectStored { .. }) {
            self.0.push(fact.into_owned());
        }
    }
}

impl ChunkedBody for ObjectSnapshotBody {
    fn next(&mut self, out: &mut Vec<u8>) -> bool {
        if !std::mem::replace(&mut self.is_started, true) {
            let events = self.admin.events.as_ref();
            // The message number is read first: its message must not contain events later than the event number.
            let sequence = events.map(|events| events.sequence());
            let event = events.map(|events| events.last_event());
            line(&SnapshotLine::Begin { sequence, event }, out);
        }
        let Some(from) = self.cursor.take() else {
            line(&SnapshotLine::End { objects: self.objects }, out);
            return false;
        };
        let mut objects = ObjectFactCollector::default();
        self.cursor = self.admin.server.master.snapshot(from, OBJECTS_PER_LOCK, &mut objects);
        for fact in &objects.0 {
            let StateChange::ObjectStored { object, .. } = fact else { continue };
            self.append_new_segments(&object.locations, out);
            let segments = object.locations.iter().filter_map(|location| self.names.get(&location.segment));
            self.objects += 1;
            let segments = segments.map(String::as_str).collect();
            let (tenant, key) = (&*object.tenant, &*object.key);
            let (disk, group) = (
                object.disk_copy.as_ref().map(|copy| client_ids::published(copy.client)),
                object.group.as_deref(),
            );
            line(&SnapshotLine::Object { tenant, key, size: object.size, segments, disk, group }, out);
        }
        true
    }
}

impl ObjectSnapshotBody {
    /// Appends lines for segments that occur for the first time.
    fn append_new_segments(&mut self, locations: &[ReplicaLocation], out: &mut Vec<u8>) {
        if locations.iter().all(|location| self.names.contains_key(&location.segment)) {
            return;
        }
        let master = &self.admin.server.master;
        for segment in master.segments_detail().segments {
            if self.names.contains_key(&segment.segment_id) {
                continue;
            }
            let live = !master.is_silent(segment.segment_id);
            let (segment_id, client_id) = (segment.segment_id, client_ids::published(segment.client_id));
            line(
                &SnapshotLine::Segment { segment_id, segment_name: &segment.segment_name, client_id, live },
                out,
            );
            self.names.insert(segment_id, segment.segment_name);
        }
        // A segment that is gone by now is not looked up again.
        for location in locations {
            self.names.entry(location.segment).or_default();
        }
    }
}

/// The whole snapshot as a streaming body.
pub(super) fn all(admin: Arc<AdminContext>) -> impl ChunkedBody {
    let from = Some(SnapshotCursor::default());
    ObjectSnapshotBody { admin, cursor: from, is_started: false, names: HashMap::new(), objects: 0 }
}

pub(super) async fn get(State(admin): SharedAdminContext) -> Response {
    response::json_lines(body(all(admin)))
}
