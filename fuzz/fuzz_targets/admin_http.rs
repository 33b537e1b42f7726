//! A master's admin and metadata servers respond to requests with any path, query and body. The first line is method and
//! target, the rest is the body.

#![no_main]

use std::sync::Arc;

use axum::body::Body;
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use libfuzzer_sys::fuzz_target;
use mooncake_wire::types::{Segment, Uuid};
use moongate_master::http::{AdminContext, admin_router};
use moongate_master::journal::MemoryJournal;
use moongate_master::metadata::{MetadataStore, metadata_router};
use moongate_master::observer::{FactObserver, ObservingJournal};
use moongate_master::summary::MetricsSummary;
use moongate_master::{LeadershipStatus, MasterServer, MasterServerOptions};
use moongate_master_core::MasterCoreOptions;
use parking_lot::Mutex;
use tower::ServiceExt as _;

fn admin() -> Arc<AdminContext> {
    let observer = Arc::new(FactObserver::new(None));
    let journal = ObservingJournal::new(Arc::new(MemoryJournal::new(1 << 16)), Arc::clone(&observer));
    let core = MasterCoreOptions { shards: 2, ..MasterCoreOptions::default() };
    let server = Arc::new(MasterServer::new(
        MasterServerOptions { core, ..MasterServerOptions::default() },
        Arc::new(journal),
    ));
    server.leadership.store(Arc::new(LeadershipStatus::standalone()));
    let node = Uuid { first: 1, second: 2 };
    let segment = Segment {
        id: node,
        name: "10.0.0.1:12345",
        base: 1 << 32,
        size: 1 << 24,
        te_endpoint: "10.0.0.1:12345",
        protocol: "tcp",
        host_id: "",
        locality: None,
    };
    server
        .master
        .mount(server.clock.now_ms(), &segment, node, &mut server.recorder())
        .expect("a good segment is taken");
    let summary = Mutex::new(MetricsSummary::new(&server));
    Arc::new(AdminContext { server, observer, events: None, quotas: None, summary })
}

fuzz_target!(|bytes: &[u8]| {
    let (line, body) = bytes.split_at(bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len()));
    let Some((method, target)) = std::str::from_utf8(line).ok().and_then(|line| line.split_once(' ')) else {
        return;
    };
    let Ok(method) = method.parse::<Method>() else { return };
    let body = body.get(1..).unwrap_or_default().to_vec();
    let router = if target.starts_with("/metadata") {
        metadata_router(Arc::new(MetadataStore::in_memory()))
    } else {
        admin_router(admin())
    };
    let Ok(request) = Request::builder().method(method).uri(target).body(Body::from(body)) else { return };
    // The response of Mooncake's master for an unknown segment.
    let may_fail = request.uri().path() == "/query_segment";
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a thread is there");
    runtime.block_on(async {
        let Ok(response) = router.oneshot(request).await;
        let status = response.status();
        assert!(may_fail || status != StatusCode::INTERNAL_SERVER_ERROR, "{status}");
        response.into_body().collect().await.expect("an answer is whole");
    });
});
