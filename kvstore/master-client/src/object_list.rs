//! The list of all readable objects with their locations, from a Moongate master.
//!
//! Such a master serves other requests meanwhile, so the list takes as long as both sides need.
//! Mooncake's masters have no such list; see [`crate::snapshot`].

use std::time::Instant;

use bytes::Bytes;
use mooncake_wire::object_locations::{ListPosition, ListedObject, LocationBatch};
use tokio::sync::Mutex;

use crate::admin::{AdminClient, AdminError};
use crate::snapshot::{MAX_RETRIES, RETRY_PAUSE, StoreSnapshotSummary};

/// Objects that are passed to the caller between two points at which other tasks may run: some tens of microseconds of its work.
const OBJECTS_PER_POLL: usize = 256;

/// Receives a list.
pub trait ObjectListReceiver {
    /// A batch is going to be requested.
    fn requested(&mut self);

    /// Adds objects of the batch that was requested last. Returns how many of them it used; `None` if the batch is out of date and has to
    /// be requested again.
    fn add(&mut self, batch: &LocationBatch<'_>, objects: &[ListedObject<'_>]) -> Option<u64>;
}

/// Lists the objects of the default tenant. `order` is locked from each request until its results were added: callers that look up single
/// objects concurrently lock it too, so that results are applied in the master's order. Concurrent changes may be included or not. Dropping
/// the future cancels the list.
///
/// # Errors
/// [`AdminError::NotFound`] if the master has no such list; when it does not respond, when it restarts during the list, or when a batch is
/// damaged. Some objects may have been added before.
pub async fn read(
    admin: &AdminClient,
    order: &Mutex<()>,
    receiver: &mut impl ObjectListReceiver,
) -> Result<StoreSnapshotSummary, AdminError> {
    let started_at = Instant::now();
    let mut summary = StoreSnapshotSummary::default();
    let mut after = None;
    loop {
        let guard = order.lock().await;
        receiver.requested();
        let Some(bytes) = request(admin, after, &mut summary).await? else {
            drop(guard);
            tokio::time::sleep(RETRY_PAUSE).await;
            continue;
        };
        let batch = admin.parse_object_locations(&bytes)?;
        let Some(used) = add(receiver, &batch).await else { continue };
        drop(guard);
        let listed = batch.objects.len() as u64;
        summary.listed += listed;
        summary.located += used;
        summary.skipped += listed.saturating_sub(used);
        after = batch.next;
        if after.is_none() {
            summary.elapsed = started_at.elapsed();
            return Ok(summary);
        }
    }
}

/// Passes a batch to the receiver. Returns how many objects it used, `None` if the batch is out of date.
async fn add(receiver: &mut impl ObjectListReceiver, batch: &LocationBatch<'_>) -> Option<u64> {
    let mut used = 0;
    for objects in batch.objects.chunks(OBJECTS_PER_POLL) {
        used += receiver.add(batch, objects)?;
        tokio::task::yield_now().await;
    }
    Some(used)
}

/// Requests one batch. `None` if the caller should retry.
async fn request(
    admin: &AdminClient,
    after: Option<ListPosition>,
    summary: &mut StoreSnapshotSummary,
) -> Result<Option<Bytes>, AdminError> {
    let requested_at = Instant::now();
    let result = admin.object_locations(after).await;
    summary.lookup_time += requested_at.elapsed();
    match result {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.is_transient() && summary.retries < MAX_RETRIES => {
            summary.retries += 1;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::Router;
    use axum::extract::RawQuery;
    use axum::http::StatusCode;
    use axum::routing::get;
    use mooncake_wire::object_locations::{LocationBatchWriter, ObjectLocation};
    use parking_lot::Mutex as SyncMutex;

    use super::*;

    const LOCATION: ObjectLocation<'_> = ObjectLocation { endpoint: "a:1", is_on_disk: false };

    fn position(slot: u32) -> ListPosition {
        ListPosition { table: 7, shard: 0, slot }
    }

    fn batch(key: &str, next: Option<u32>) -> Vec<u8> {
        let mut writer = LocationBatchWriter::with_capacity(0);
        writer.add(key, std::iter::once(LOCATION));
        writer.finish(next.map(position))
    }

    type Responses = Vec<(StatusCode, Vec<u8>)>;

    #[derive(Default)]
    struct ReceivedKeys {
        keys: Vec<String>,
        /// A batch with this key is out of date once.
        outdated: Option<&'static str>,
    }

    impl ObjectListReceiver for ReceivedKeys {
        fn requested(&mut self) {}

        fn add(&mut self, batch: &LocationBatch<'_>, objects: &[ListedObject<'_>]) -> Option<u64> {
            if self.outdated.take_if(|key| objects.iter().any(|object| object.key == *key)).is_some() {
                return None;
            }
            assert!(objects.iter().all(|object| batch.locations(object).eq([LOCATION])));
            self.keys.extend(objects.iter().map(|object| object.key.to_owned()));
            Some(objects.len() as u64)
        }
    }

    /// The result of a list, the keys, and the requested positions, from a server with these responses.
    async fn list(
        responses: Responses,
    ) -> (Result<StoreSnapshotSummary, AdminError>, Vec<String>, Vec<String>) {
        let shared = Arc::new(SyncMutex::new((responses.into_iter(), Vec::new())));
        let served = Arc::clone(&shared);
        let respond = move |RawQuery(query): RawQuery| async move {
            let (responses, queries) = &mut *served.lock();
            queries.push(query.unwrap_or_default());
            responses.next().unwrap_or((StatusCode::NOT_FOUND, Vec::new()))
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let router = Router::new().route("/api/v1/object_locations", get(respond));
        let admin = AdminClient::new(&address, Default::default()).unwrap();
        let mut received = ReceivedKeys { outdated: Some("outdated"), ..ReceivedKeys::default() };
        let order = Mutex::default();
        let result = tokio::select! {
            result = read(&admin, &order, &mut received) => result,
            served = axum::serve(listener, router) => panic!("{served:?}"),
        };
        let queries = shared.lock().1.clone();
        (result, received.keys, queries)
    }

    #[tokio::test]
    async fn each_batch_continues_after_the_one_before() {
        let ok = |key, next| (StatusCode::OK, batch(key, next));
        let (result, keys, queries) = list(vec![ok("a", Some(9)), ok("b", Some(11)), ok("c", None)]).await;
        assert_eq!(keys, ["a", "b", "c"]);
        assert_eq!(
            queries,
            [String::new(), format!("after={}", position(9)), format!("after={}", position(11))]
        );
        let summary = result.unwrap();
        assert_eq!((summary.listed, summary.located, summary.skipped), (3, 3, 0));
    }

    #[tokio::test]
    async fn a_batch_that_is_out_of_date_is_requested_again() {
        let ok = |key, next| (StatusCode::OK, batch(key, next));
        let (result, keys, queries) = list(vec![ok("a", Some(9)), ok("outdated", None), ok("b", None)]).await;
        assert_eq!((result.unwrap().listed, keys), (2, vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(queries[1], queries[2]);
    }

    #[tokio::test]
    async fn a_damaged_batch_or_another_table_is_an_error() {
        let first = (StatusCode::OK, batch("a", Some(9)));
        let mut damaged = batch("b", None);
        damaged[40] ^= 1;
        let (result, keys, _) = list(vec![first.clone(), (StatusCode::OK, damaged)]).await;
        assert!(matches!(result, Err(AdminError::Malformed { .. })), "{result:?}");
        assert_eq!(keys, ["a"]);
        let (result, ..) = list(vec![first, (StatusCode::GONE, Vec::new())]).await;
        assert!(matches!(result, Err(AdminError::Status { status: 410, .. })), "{result:?}");
        let (result, ..) = list(vec![]).await;
        assert!(matches!(result, Err(AdminError::NotFound { .. })), "{result:?}");
    }

    #[tokio::test]
    async fn a_batch_is_requested_again_after_a_failover() {
        let standby = (StatusCode::SERVICE_UNAVAILABLE, Vec::new());
        let first = (StatusCode::OK, batch("a", Some(9)));
        let (result, keys, queries) = list(vec![first, standby, (StatusCode::OK, batch("b", None))]).await;
        assert_eq!((result.unwrap().retries, keys), (1, vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(queries[1], queries[2]);
    }
}
