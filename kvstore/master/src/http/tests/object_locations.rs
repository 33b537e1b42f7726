//! The list of objects with their locations.

use std::collections::BTreeMap;

use mooncake_wire::object_locations::{ListPosition, LocationBatch};

use super::*;

/// Status and body of a request for a batch.
async fn get_batch(router: &Router, after: Option<&str>) -> (StatusCode, Vec<u8>) {
    let path = "/api/v1/object_locations";
    let path = after.map_or(path.to_owned(), |after| format!("{path}?after={after}"));
    let response = router.clone().oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
    (response.status(), response.into_body().collect().await.unwrap().to_bytes().into())
}

/// All listed objects with their endpoints, and the position of each batch after the first.
async fn list(router: &Router) -> (BTreeMap<String, Vec<String>>, Vec<ListPosition>) {
    let (mut listed, mut positions) = (BTreeMap::new(), Vec::new());
    loop {
        let after = positions.last().map(ListPosition::to_string);
        let (status, bytes) = get_batch(router, after.as_deref()).await;
        assert_eq!(status, StatusCode::OK);
        let batch = LocationBatch::parse(&bytes).unwrap();
        for object in &batch.objects {
            let endpoints = batch.locations(object).map(|location| location.endpoint.to_owned()).collect();
            assert_eq!(listed.insert(object.key.to_owned(), endpoints), None, "each object once");
        }
        match batch.next {
            Some(next) => positions.push(next),
            None => return (listed, positions),
        }
    }
}

#[tokio::test]
async fn the_list_has_exactly_what_a_query_finds() {
    let admin = admin(settings());
    let server = &admin.server;
    mount(server);
    let keys: Vec<String> = (0..20_000).map(|number| format!("{number:064x}_0_k")).collect();
    for (number, key) in keys.iter().enumerate() {
        put(server, key, 1, 1 + u64::from(number % 5 == 0));
    }
    let context = CallContext { now_ms: server.clock.now_ms(), client: id(1), tenant: "default" };
    let config = ReplicateConfig::<&str>::default();
    let incomplete = PutStartRequest { key: "incomplete", size: 1, config: &config };
    server.master.put_start(context, &incomplete, &mut server.recorder()).unwrap();
    let router = admin_router(Arc::clone(&admin));
    let queried = |listed: &BTreeMap<String, Vec<String>>| {
        let found = server.master.peek("default", &keys);
        let readable = keys.iter().zip(&found).filter_map(|(key, found)| Some((key, found.as_ref().ok()?)));
        let mut count = 0;
        for (key, replicas) in readable {
            let endpoints: Vec<&str> = objects::in_memory(replicas)
                .iter()
                .map(|buffer| match &*buffer.endpoint {
                    endpoint if endpoint == SEGMENTS[0] => SEGMENTS[0],
                    _ => SEGMENTS[1],
                })
                .collect();
            assert_eq!(listed[key], endpoints);
            count += 1;
        }
        assert_eq!(listed.len(), count);
        count
    };
    let (listed, positions) = list(&router).await;
    assert_eq!((queried(&listed), positions.len() >= 2), (20_000, true));
    // The first segment's replicas cannot be read any more.
    server.master.client_disconnected(server.clock.now_ms(), id(1), &mut server.recorder());
    let (listed, _) = list(&router).await;
    assert_eq!(queried(&listed), 4000);
}

/// Its slots contain other objects: continuing there would skip some.
#[tokio::test]
async fn positions_of_another_table_are_rejected() {
    let admin = admin(settings());
    mount(&admin.server);
    (0..9000).for_each(|number| put(&admin.server, &number.to_string(), 1, 1));
    let router = admin_router(Arc::clone(&admin));
    let (_, positions) = list(&router).await;
    let position = positions[0];
    assert_eq!(get_batch(&router, Some(&position.to_string())).await.0, StatusCode::OK);
    let other = ListPosition { table: !position.table, ..position };
    assert_eq!(get_batch(&router, Some(&other.to_string())).await.0, StatusCode::GONE);
    assert_eq!(get_batch(&router, Some("0")).await.0, StatusCode::BAD_REQUEST);
}

/// Whatever changes between two batches, an object that is not changed is listed once.
#[tokio::test]
async fn unchanged_objects_are_listed_during_changes() {
    let admin = admin(MasterCoreOptions { shards: 4, ..settings() });
    let server = &admin.server;
    mount(server);
    let key = |number: u64| format!("{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (0..30_000).for_each(|number| put(server, &key(number), 1, 1));
    let router = admin_router(Arc::clone(&admin));
    let (mut listed, mut after, mut step) = (BTreeMap::<String, u32>::new(), None, 0);
    loop {
        let (_, bytes) = get_batch(&router, after.as_deref()).await;
        let batch = LocationBatch::parse(&bytes).unwrap();
        for object in &batch.objects {
            *listed.entry(object.key.to_owned()).or_default() += 1;
        }
        let Some(next) = batch.next else { break };
        after = Some(next.to_string());
        // Odd numbers change: they are removed here and there, and others are added in their place.
        for number in (1..2000).step_by(2).map(|number| step * 2000 + number) {
            let context = RemoveContext { now_ms: server.clock.now_ms(), tenant: "default", force: true };
            server.master.remove(context, &key(number), &mut server.recorder()).ok();
            put(server, &key(100_001 + number), 1, 1);
        }
        step += 1;
    }
    assert!(step >= 3, "{step}");
    for number in (0..30_000).step_by(2) {
        assert_eq!(listed.get(&key(number)), Some(&1), "{number}");
    }
}
