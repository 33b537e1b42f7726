//! All objects, a line of JSON each, in a way that fits the KV events.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use mooncake_wire::types::Uuid;
use moongate_master_core::{ReplicaLocation, SnapshotCursor, StateChange, StateChangeSink};
use serde::Serialize;

use super::chunked_body::{ChunkedBody, body};
use super::{AdminContext, SharedAdminContext, client_ids, response};

/// Objects that are looked at under one lock.
const OBJECTS_PER_LOCK: u32 = 512;

/// A line.
#[derive(Serialize)]
#[serde(untagged)]
enum SnapshotLine<'a> {
    /// The first: what is told here contains all events up to `event`, and all messages up to `sequence`. It may contain later ones too,
    /// which do no harm when they are applied again. Both are null if no events are published.
    Begin { sequence: Option<u64>, event: Option<u64> },
    /// A segment, before the first object that it has.
    Segment { segment_id: Uuid, segment_name: &'a str, client_id: Uuid, live: bool },
    /// An object that has been written.
    Object {
        tenant: &'a str,
        key: &'a str,
        size: u64,
        segments: Vec<&'a str>,
        /// The client that has it on its disk.
        #[serde(skip_serializing_if = "Option::is_none")]
        disk: Option<Uuid>,
        #[serde(skip_serializing_if = "Option::is_none")]
        group: Option<&'a str>,
    },
    /// The last one: nothing is missing.
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
    // Writing to memory does not fail, and nothing here is a map.
    if serde_json::to_writer(&mut *out, line).is_ok() {
        out.push(b'\n');
    }
}

/// The objects of one step, taken while their shard is locked.
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
            // The message's number first: events that it contains must not be younger than the event's number says.
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
            let segments = object.locations.iter().filter_map(|it| self.names.get(&it.segment));
            self.objects += 1;
            let segments = segments.map(String::as_str).collect();
            let (tenant, key) = (&*object.tenant, &*object.key);
            let (disk, group) = (
                object.disk_copy.as_ref().map(|it| client_ids::published(it.client)),
                object.group.as_deref(),
            );
            line(&SnapshotLine::Object { tenant, key, size: object.size, segments, disk, group }, out);
        }
        true
    }
}

impl ObjectSnapshotBody {
    /// Tells segments that have not been told yet.
    fn append_new_segments(&mut self, places: &[ReplicaLocation], out: &mut Vec<u8>) {
        if places.iter().all(|place| self.names.contains_key(&place.segment)) {
            return;
        }
        let master = &self.admin.server.master;
        for it in master.segments_detail().segments {
            if self.names.contains_key(&it.segment_id) {
                continue;
            }
            let live = !master.is_silent(it.segment_id);
            let (segment_id, client_id) = (it.segment_id, client_ids::published(it.client_id));
            line(&SnapshotLine::Segment { segment_id, segment_name: &it.segment_name, client_id, live }, out);
            self.names.insert(segment_id, it.segment_name);
        }
        // One that is gone by now is not looked for again.
        for place in places {
            self.names.entry(place.segment).or_default();
        }
    }
}

/// The whole snapshot.
pub(super) fn all(admin: Arc<AdminContext>) -> impl ChunkedBody {
    let from = Some(SnapshotCursor::default());
    ObjectSnapshotBody { admin, cursor: from, is_started: false, names: HashMap::new(), objects: 0 }
}

pub(super) async fn get(State(admin): SharedAdminContext) -> Response {
    response::json_lines(body(all(admin)))
}
