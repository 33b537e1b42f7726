//! `/api/v1/object_locations`: readable objects with their locations, in batches; see [`mooncake_wire::object_locations`].

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mooncake_wire::ErrorCode;
use mooncake_wire::events::mooncake::DEFAULT_TENANT;
use mooncake_wire::object_locations::{ListPosition, LocationBatchWriter};
use moongate_master_core::ObjectCursor;
use tokio::sync::Semaphore;

use super::{AdminContext, SharedAdminContext, response};
use crate::clock::entropy;
use crate::query_string::QueryString;

/// Objects and bytes of a batch after which it is sent.
const BATCH_OBJECTS: usize = 8192;
const BATCH_BYTES: usize = 1 << 20;
/// Initial memory of a batch in bytes: most keys have up to a hundred.
const INITIAL_BYTES: usize = BATCH_OBJECTS * 110;
/// Table slots that are read under one lock, for about ten microseconds.
const SLOTS_PER_LOCK: u32 = 64;
/// Locks between two points at which other tasks may run.
const LOCKS_PER_POLL: usize = 16;
/// Locks after which a batch is sent: other tenants' objects and free slots are skipped.
const MAX_LOCKS: usize = 4096;
/// Batches that are read at the same time; further requests wait. So lists of any number of gateways use at most this many of the master's
/// threads.
const CONCURRENT_BATCHES: usize = 2;

/// Reads batches of one master's table.
#[derive(Debug)]
pub(super) struct ObjectLister {
    /// Identifies the table that positions belong to: its slots are meaningless to another process or another leader.
    table: u64,
    slots: Semaphore,
}

impl ObjectLister {
    /// For a table that has not been listed before.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { table: entropy(), slots: Semaphore::new(CONCURRENT_BATCHES) })
    }

    /// The batch that starts at a position.
    async fn read(&self, admin: &AdminContext, from: ObjectCursor) -> Vec<u8> {
        // Never closed, so this does not fail.
        let _slot = self.slots.acquire().await;
        let mut batch = LocationBatchWriter::with_capacity(INITIAL_BYTES);
        let (mut cursor, mut locks) = (Some(from), 0);
        while let Some(position) = cursor {
            if batch.len() >= BATCH_OBJECTS || batch.bytes() >= BATCH_BYTES || locks >= MAX_LOCKS {
                break;
            }
            if locks % LOCKS_PER_POLL == LOCKS_PER_POLL - 1 {
                tokio::task::yield_now().await;
            }
            let master = &admin.server.master;
            cursor = master.readable_objects(DEFAULT_TENANT, position, SLOTS_PER_LOCK, |key, locations| {
                batch.add(key, locations);
            });
            locks += 1;
        }
        let next = cursor.map(|cursor| {
            let (shard, slot) = cursor.numbers();
            ListPosition { table: self.table, shard, slot }
        });
        batch.finish(next)
    }
}

/// Neither grants leases nor counts as a read.
pub(super) async fn get(
    State(admin): SharedAdminContext,
    Extension(lister): Extension<Arc<ObjectLister>>,
    query: QueryString,
) -> Response {
    let from = match query.raw("after").map(str::parse::<ListPosition>) {
        None => ObjectCursor::default(),
        Some(Ok(position)) if position.table == lister.table => {
            ObjectCursor::from_numbers(position.shard, position.slot)
        }
        // It would skip objects here.
        Some(Ok(_)) => return response::refused(StatusCode::GONE, ErrorCode::INVALID_VERSION),
        Some(Err(error)) => return response::invalid(format!("after: {error}")),
    };
    response::binary(lister.read(&admin, from).await)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mooncake_wire::object_locations::LocationBatch;
    use tokio::time::timeout;

    use super::*;
    use crate::http::tests::{admin, settings};

    #[tokio::test]
    async fn further_batches_wait() {
        let (lister, admin) = (ObjectLister::new(), admin(settings()));
        let others = lister.slots.acquire_many(CONCURRENT_BATCHES as u32).await;
        let wait = Duration::from_millis(20);
        timeout(wait, lister.read(&admin, ObjectCursor::default())).await.unwrap_err();
        drop(others);
        let bytes = lister.read(&admin, ObjectCursor::default()).await;
        assert!(LocationBatch::parse(&bytes).unwrap().objects.is_empty());
        assert_eq!(lister.slots.available_permits(), CONCURRENT_BATCHES);
    }
}
