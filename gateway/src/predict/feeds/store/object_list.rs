//! Adds the objects that a Moongate master lists to the index.

use mooncake_wire::key::ObjectKey;
use mooncake_wire::object_locations::{ListedObject, LocationBatch};
use moongate_master_client::object_list::ObjectListReceiver;

use super::StoreView;
use crate::kv_index::{StoreKeyNaming, StoredBlockPart};

/// Objects that are added under one lock of the nodes: about ten microseconds.
const OBJECTS_PER_LOCK: usize = 64;

/// Receives the list of one scan.
pub(super) struct ListedObjectReceiver<'a> {
    view: &'a StoreView,
    namings: &'a [StoreKeyNaming],
    /// Number of times that the store had been cleared when the batch was requested.
    clears: u64,
}

impl<'a> ListedObjectReceiver<'a> {
    pub(super) fn new(view: &'a StoreView, namings: &'a [StoreKeyNaming]) -> Self {
        Self { view, namings, clears: 0 }
    }

    fn parse_key(&self, key: &str) -> Option<StoredBlockPart> {
        let key = ObjectKey::parse(key)?;
        self.namings.iter().find_map(|naming| naming.parse_key(&key))
    }
}

impl ObjectListReceiver for ListedObjectReceiver<'_> {
    fn requested(&mut self) {
        self.clears = self.view.nodes.lock().clears();
    }

    fn add(&mut self, batch: &LocationBatch<'_>, objects: &[ListedObject<'_>]) -> Option<u64> {
        let mut added = 0;
        let mut parts = Vec::with_capacity(OBJECTS_PER_LOCK);
        for objects in objects.chunks(OBJECTS_PER_LOCK) {
            parts.clear();
            parts.extend(objects.iter().filter_map(|object| Some((self.parse_key(object.key)?, object))));
            added += self.view.insert_listed(batch, &parts, self.clears)?;
        }
        Some(added)
    }
}

impl StoreView {
    /// Records objects of a batch that was requested after `clears` clears of the store. Returns how many of them can be read. `None` if
    /// the store was cleared since, so that the batch is out of date.
    fn insert_listed(
        &self,
        batch: &LocationBatch<'_>,
        parts: &[(StoredBlockPart, &ListedObject<'_>)],
        clears: u64,
    ) -> Option<u64> {
        let mut nodes = self.nodes.lock();
        if nodes.clears() != clears {
            return None;
        }
        let mut added = 0;
        self.index.update_each(
            parts,
            |(stored, _)| stored.block,
            |blocks, (stored, object)| {
                let Some((endpoint, medium)) = nodes.listed_location(batch.locations(object)) else { return };
                // A full index is reserved for blocks of requests.
                if blocks.has_capacity_for(stored.block)
                    && let Some(node) = nodes.node_at(endpoint, blocks)
                {
                    blocks.add_store_part(stored.block, stored.part, node, medium);
                    added += 1;
                }
            },
        );
        Some(added)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::time::Duration;

    use axum::Router;
    use axum::extract::RawQuery;
    use axum::http::StatusCode;
    use axum::routing::get;
    use mooncake_wire::object_locations::{ListPosition, LocationBatchWriter, ObjectLocation};
    use moongate_discovery::{EngineStoreFacts, StoreKeyScheme};
    use moongate_master_client::admin::AdminClient;
    use moongate_scheduler::index::BlockHashNamespace;
    use parking_lot::Mutex;
    use tokio::sync::Notify;
    use tokio::time::{sleep, timeout};

    use super::super::StoreAdmins;
    use super::super::changes::{PendingStoreChange, StoreChangeQueue};
    use super::*;
    use crate::feedback::GatewayMetrics;
    use crate::kv_index::KvIndex;

    fn naming() -> StoreKeyNaming {
        let store = EngineStoreFacts {
            keys: StoreKeyScheme::Sglang { prefix: Some("tiny".into()), mla: Some(false) },
            tp_size: Some(1),
            pp_size: None,
            prefetch_threshold: None,
            prefetch_policy: None,
            master: None,
        };
        StoreKeyNaming::from_store(&store, BlockHashNamespace::new(&["sglang", "tiny"])).unwrap()
    }

    fn view(max_blocks: usize) -> Arc<StoreView> {
        view_of("127.0.0.1:1", max_blocks)
    }

    fn view_of(admin: &str, max_blocks: usize) -> Arc<StoreView> {
        let admin = AdminClient::new(admin, Default::default()).unwrap();
        StoreView::new(
            StoreAdmins::new(vec![admin]).unwrap(),
            KvIndex::new(max_blocks),
            GatewayMetrics::new(None).store,
        )
    }

    fn key(block: u64, tensor: &str) -> String {
        let hash = format!("{:016x}", block.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        format!("tiny_{}_0_{tensor}", hash.repeat(4))
    }

    fn block(number: u64) -> u64 {
        naming().parse_key(&ObjectKey::parse(&key(number, "k")).unwrap()).unwrap().block
    }

    fn batch(keys: &[String]) -> Vec<u8> {
        part_of_list(keys, None)
    }

    fn part_of_list(keys: &[String], next: Option<ListPosition>) -> Vec<u8> {
        let mut writer = LocationBatchWriter::with_capacity(0);
        for key in keys {
            writer.add(key, std::iter::once(ObjectLocation { endpoint: "10.0.0.1:7", is_on_disk: false }));
        }
        writer.finish(next)
    }

    /// Both objects of each block.
    fn keys(blocks: &[u64]) -> Vec<String> {
        blocks.iter().flat_map(|number| [key(*number, "k"), key(*number, "v")]).collect()
    }

    /// A master that finds no object by its key.
    #[derive(Default)]
    struct ListingMaster {
        /// Responses to requests for a batch; then it has no list.
        batches: Mutex<VecDeque<(StatusCode, Vec<u8>)>>,
        /// Each batch is read before this, and sent after it.
        sending: Option<Notify>,
        requested: Notify,
    }

    impl ListingMaster {
        #[expect(clippy::disallowed_methods, reason = "the test's runtime ends the server")]
        async fn serve(self: &Arc<Self>) -> String {
            let master = Arc::clone(self);
            let list = get(async move || {
                let batch = master.batches.lock().pop_front();
                master.requested.notify_one();
                if let Some(sending) = &master.sending {
                    sending.notified().await;
                }
                batch.unwrap_or((StatusCode::NOT_FOUND, Vec::new()))
            });
            let router = Router::new()
                .route("/api/v1/object_locations", list)
                .route("/get_all_keys", get(async || keys(&[1, 2]).join("\n")))
                .route(
                    "/batch_query_keys",
                    get(async |RawQuery(query): RawQuery| Self::look_up(&query.unwrap())),
                );
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            tokio::spawn(async move { axum::serve(listener, router).await });
            address
        }

        /// Objects of block 1 have been removed.
        fn look_up(query: &str) -> String {
            let (_, queried) = query.split_once('=').unwrap();
            let removed = keys(&[1]);
            let found = queried.split(',').map(|key| {
                let value = serde_json::json!([{"size_": 1, "buffer_address_": 1, "protocol_": "tcp", "transport_endpoint_": "10.0.0.1:7"}]);
                let ok = !removed.iter().any(|removed| removed == key);
                (key.to_owned(), serde_json::json!({"ok": ok, "values": ok.then_some(value)}))
            });
            serde_json::json!({"success": true, "data": found.collect::<serde_json::Map<_, _>>()}).to_string()
        }
    }

    fn stored(view: &StoreView, numbers: &[u64]) -> Vec<usize> {
        numbers.iter().map(|number| view.index.shared_prefix(&[block(*number)])).collect()
    }

    #[test]
    fn listed_parts_make_a_block_complete() {
        let (view, namings) = (view(100), [naming()]);
        let bytes = batch(&[key(1, "k"), "of another model".to_owned(), key(1, "v")]);
        let batch = LocationBatch::parse(&bytes).unwrap();
        let mut receiver = ListedObjectReceiver::new(&view, &namings);
        receiver.requested();
        assert_eq!(receiver.add(&batch, &batch.objects[..2]), Some(1));
        assert_eq!(view.index.shared_prefix(&[block(1)]), 0);
        assert_eq!(receiver.add(&batch, &batch.objects[2..]), Some(1));
        assert_eq!(view.index.shared_prefix(&[block(1)]), 1);
    }

    #[test]
    fn a_batch_from_before_a_clear_is_not_added() {
        let (view, namings) = (view(100), [naming()]);
        let bytes = batch(&[key(1, "k"), key(1, "v")]);
        let batch = LocationBatch::parse(&bytes).unwrap();
        let mut receiver = ListedObjectReceiver::new(&view, &namings);
        receiver.requested();
        view.clear();
        assert_eq!(receiver.add(&batch, &batch.objects), None);
        assert_eq!(view.index.shared_prefix(&[block(1)]), 0);
        receiver.requested();
        assert_eq!(receiver.add(&batch, &batch.objects), Some(2));
    }

    #[test]
    fn a_full_index_takes_no_listed_blocks() {
        let (view, namings) = (view(1), [naming()]);
        let bytes = batch(&[key(1, "k"), key(2, "k"), key(1, "v"), key(2, "v")]);
        let batch = LocationBatch::parse(&bytes).unwrap();
        let mut receiver = ListedObjectReceiver::new(&view, &namings);
        receiver.requested();
        assert_eq!(receiver.add(&batch, &batch.objects), Some(2));
        assert_eq!([1, 2].map(|number| view.index.shared_prefix(&[block(number)])), [1, 0]);
    }

    /// The master read the batch before it removed the objects, and the gateway receives it afterwards.
    #[tokio::test]
    async fn events_during_a_list_are_newer_than_it() {
        let listed = (StatusCode::OK, batch(&keys(&[1, 2])));
        let master = Arc::new(ListingMaster {
            batches: Mutex::new([listed].into()),
            sending: Some(Notify::new()),
            ..ListingMaster::default()
        });
        let (view, namings) = (view_of(&master.serve().await, 100), [naming()]);
        let changes = StoreChangeQueue::default();
        let test = async {
            master.requested.notified().await;
            for key in keys(&[1]) {
                let stored = naming().parse_key(&ObjectKey::parse(&key).unwrap()).unwrap();
                view.remove(stored);
                assert!(changes.add(&key, PendingStoreChange { stored, event_time_ms: 1 }));
            }
            // The locations of the changed objects could be queried now.
            sleep(Duration::from_millis(50)).await;
            master.sending.as_ref().unwrap().notify_one();
            while stored(&view, &[1, 2]) != [0, 1] {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let scan = async {
            let summary = view.scan(&namings).await.unwrap();
            assert_eq!(summary.located, 4);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = scan => {}
            () = view.query_pending(&changes) => {}
            result = timeout(Duration::from_secs(10), test) => result.unwrap(),
        }
    }

    #[tokio::test]
    async fn only_a_complete_list_removes_blocks() {
        let part = |blocks: &[u64], slot| {
            (StatusCode::OK, part_of_list(&keys(blocks), Some(ListPosition { table: 7, shard: 0, slot })))
        };
        let last = |blocks: &[u64]| (StatusCode::OK, batch(&keys(blocks)));
        let mut damaged = last(&[]);
        damaged.1[30] ^= 1;
        let gone = (StatusCode::GONE, Vec::new());
        let batches =
            [part(&[1], 1), last(&[2]), part(&[3], 1), gone, part(&[3], 1), damaged, last(&[3])].into();
        let master = Arc::new(ListingMaster { batches: Mutex::new(batches), ..ListingMaster::default() });
        let (view, namings) = (view_of(&master.serve().await, 100), [naming()]);
        view.scan(&namings).await.unwrap();
        assert_eq!(stored(&view, &[1, 2, 3]), [1, 1, 0]);
        for _ in 0..2 {
            view.scan(&namings).await.unwrap_err();
            assert_eq!(stored(&view, &[1, 2, 3]), [1, 1, 1]);
        }
        view.scan(&namings).await.unwrap();
        assert_eq!(stored(&view, &[1, 2, 3]), [0, 0, 1]);
        assert!(!view.key_lookup_logged.is_completed());
    }

    #[tokio::test]
    async fn keys_are_looked_up_if_the_master_has_no_list() {
        let master = Arc::new(ListingMaster::default());
        let (view, namings) = (view_of(&master.serve().await, 100), [naming()]);
        let summary = view.scan(&namings).await.unwrap();
        assert_eq!((summary.listed, summary.located, summary.missing), (4, 2, 2));
        assert_eq!(stored(&view, &[1, 2]), [0, 1]);
        assert!(view.key_lookup_logged.is_completed());
    }
}
