//! Health and metrics over HTTP.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use moongate_transfer::serve::TransferServer;

use crate::catalog_sync::CatalogSyncCounts;
use crate::disk::NodeDisk;
use crate::heartbeat::HeartbeatState;
use crate::scrub::ScrubCounts;
use crate::segment_pool::SegmentPool;
use crate::tasks::TaskCounts;

/// State and counters of a node's parts, from which health and metrics are read.
#[derive(Clone)]
pub(crate) struct NodeMetrics {
    pub(crate) pool: Arc<SegmentPool>,
    pub(crate) heartbeat: Arc<HeartbeatState>,
    pub(crate) serving: Arc<TransferServer>,
    pub(crate) task_counts: Arc<TaskCounts>,
    pub(crate) scrub_counts: Arc<ScrubCounts>,
    pub(crate) catalog_sync_counts: Arc<CatalogSyncCounts>,
    /// REST API requests that were rejected by access control.
    pub(crate) refused_calls: Arc<AtomicU64>,
    /// The disk tier, if one is configured.
    pub(crate) disk: Option<Arc<NodeDisk>>,
}

pub(crate) fn router(node: NodeMetrics) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/metrics/summary", get(summary))
        .with_state(node)
}

/// `/health`, with the body of Mooncake's clients.
async fn health(State(node): State<NodeMetrics>) -> Response {
    let (status, code, text) = if node.heartbeat.is_healthy() {
        (StatusCode::OK, 0, "healthy")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, 2, "master_unreachable")
    };
    let body = format!(r#"{{"status":"{text}","code":{code}}}"#);
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

async fn metrics(State(node): State<NodeMetrics>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text(&node)).into_response()
}

async fn summary(State(node): State<NodeMetrics>) -> Response {
    let counts = node.serving.counts().snapshot();
    let body = format!(
        "segments: {} ({} B) | reads: {} ({} B) | writes: {} ({} B) | refused: {} | failed: {} | connections: {} | master: {}\n",
        node.pool.segments().len(),
        node.pool.bytes(),
        counts.reads,
        counts.read_bytes,
        counts.writes,
        counts.written_bytes,
        counts.rejected,
        counts.failed,
        node.serving.open(),
        if node.heartbeat.is_healthy() { "reachable" } else { "unreachable" },
    );
    ([(header::CONTENT_TYPE, "text/plain")], body).into_response()
}

/// Writes a metric family. A sample's labels are in braces, or empty.
fn family(out: &mut String, name: &str, kind: &str, help: &str, samples: &[(&str, f64)]) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (labels, value) in samples {
        let _ = writeln!(out, "{name}{labels} {value}");
    }
}

fn text(node: &NodeMetrics) -> String {
    let counts = node.serving.counts().snapshot();
    let (heartbeat, tasks, scrubbed) = (&node.heartbeat, &node.task_counts, &node.scrub_counts);
    let number = |value: u64| value as f64;
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let mut out = String::new();
    let mut counter = |name: &str, help: &str, samples: &[(&str, f64)]| {
        family(&mut out, &format!("moongate_store_{name}_total"), "counter", help, samples);
    };
    let (read, write) = (r#"{operation="read"}"#, r#"{operation="write"}"#);
    counter(
        "transfers",
        "Completed transfers with clients and other nodes: `read`, `write`.",
        &[(read, number(counts.reads)), (write, number(counts.writes))],
    );
    counter(
        "transfer_bytes",
        "Bytes of completed transfers.",
        &[(read, number(counts.read_bytes)), (write, number(counts.written_bytes))],
    );
    counter(
        "transfer_seconds",
        "Time of completed transfers, from the header to the last byte.",
        &[(read, seconds(counts.read_nanos)), (write, seconds(counts.write_nanos))],
    );
    counter(
        "transfers_by_protocol",
        "Completed transfers by protocol version: Mooncake's two (`v1`, `v2`), and Moongate's with checksums (`checked`).",
        &[
            (r#"{protocol="v1"}"#, number(counts.v1)),
            (r#"{protocol="v2"}"#, number(counts.v2)),
            (r#"{protocol="checked"}"#, number(counts.checked)),
        ],
    );
    counter(
        "transfer_failures",
        "Failed transfers: `rejected` (address outside the segments), `broken` (connection lost), `damaged` (checksum mismatch), `malformed` (protocol error), `unfinished` (reads of incompletely written ranges). With certificates also rejected capabilities: `invalid_signature`, `expired`, `out_of_range` and `wrong_operation`.",
        &[
            (r#"{reason="rejected"}"#, number(counts.rejected)),
            (r#"{reason="broken"}"#, number(counts.failed)),
            (r#"{reason="damaged"}"#, number(counts.damaged)),
            (r#"{reason="malformed"}"#, number(counts.malformed)),
            (r#"{reason="unfinished"}"#, number(counts.unfinished)),
            (r#"{reason="invalid_signature"}"#, number(counts.refused_forged)),
            (r#"{reason="expired"}"#, number(counts.refused_expired)),
            (r#"{reason="out_of_range"}"#, number(counts.refused_range)),
            (r#"{reason="wrong_operation"}"#, number(counts.refused_rights)),
        ],
    );
    counter(
        "delayed_reads",
        "Reads that waited for earlier writes on `v1` connections, which have no acknowledgements.",
        &[("", number(counts.delayed_reads))],
    );
    counter(
        "connections_refused",
        "Connections that were refused or closed: `not_allowed` (`--allow-peers`), `connection_limit`, `idle` (closed without a request, to free a slot), `unauthenticated` (TLS failed, or no certificate of the configured CA).",
        &[
            (r#"{reason="not_allowed"}"#, number(counts.not_allowed)),
            (r#"{reason="connection_limit"}"#, number(counts.over_limit)),
            (r#"{reason="idle"}"#, number(counts.evicted)),
            (r#"{reason="unauthenticated"}"#, number(counts.unauthenticated)),
        ],
    );
    counter(
        "api_requests_rejected",
        "REST API requests that were rejected: not from this machine, or without the token.",
        &[("", number(node.refused_calls.load(Relaxed)))],
    );
    counter(
        "heartbeats",
        "Heartbeats to the master: `done`, `failed`.",
        &[
            (r#"{result="done"}"#, number(heartbeat.succeeded.load(Relaxed))),
            (r#"{result="failed"}"#, number(heartbeat.failed.load(Relaxed))),
        ],
    );
    counter(
        "remounts",
        "Times the node mounted its segments again because the master had expired it.",
        &[("", number(heartbeat.remounts.load(Relaxed)))],
    );
    counter(
        "tasks",
        "Copy and move tasks from the master: `done`, `failed`.",
        &[
            (r#"{result="done"}"#, number(tasks.done.load(Relaxed))),
            (r#"{result="failed"}"#, number(tasks.failed.load(Relaxed))),
        ],
    );
    counter(
        "task_bytes",
        "Bytes transferred by copy and move tasks.",
        &[("", number(tasks.bytes.load(Relaxed)))],
    );
    counter(
        "scrubbed_bytes",
        "Bytes re-read in the background to detect corruption.",
        &[("", number(scrubbed.bytes.load(Relaxed)))],
    );
    counter(
        "corrupt_ranges",
        "Ranges that failed their checksum.",
        &[("", number(scrubbed.damaged.load(Relaxed)))],
    );
    let catalog = node.pool.catalog_counts();
    counter(
        "catalog_dropped_records",
        "Object records that cannot be offered to a master that lost its log: `damaged` (failed their checksum), `stale` (range overwritten or lost before this process started), `unrecorded` (no slot, or the key is too long), `unverified` (bytes incomplete), `unconfirmed` (not in the master).",
        &[
            (r#"{reason="damaged"}"#, number(catalog.damaged)),
            (r#"{reason="stale"}"#, number(catalog.stale)),
            (r#"{reason="unrecorded"}"#, number(catalog.unrecorded)),
            (r#"{reason="unverified"}"#, number(node.catalog_sync_counts.unproven.load(Relaxed))),
            (r#"{reason="unconfirmed"}"#, number(node.catalog_sync_counts.unconfirmed.load(Relaxed))),
        ],
    );
    counter(
        "catalog_recorded_objects",
        "Objects recorded in the catalog, from which a master that lost its log is restored.",
        &[("", number(node.catalog_sync_counts.recorded.load(Relaxed)))],
    );
    if let Some(disk) = &node.disk {
        write_disk(&mut out, disk);
    }
    let mut gauge = |name: &str, help: &str, value: f64| {
        family(&mut out, &format!("moongate_store_{name}"), "gauge", help, &[("", value)]);
    };
    gauge("segment_bytes", "Bytes of mounted segments.", number(node.pool.bytes()));
    gauge(
        "catalog_objects",
        "Objects that can be offered to a master that lost its log.",
        number(catalog.objects),
    );
    gauge("segments", "Mounted segments.", node.pool.segments().len() as f64);
    gauge("connections", "Open connections for transfers.", node.serving.open() as f64);
    gauge(
        "master_reachable",
        "1 if the master answered the last heartbeat, else 0.",
        f64::from(u8::from(node.heartbeat.is_healthy())),
    );
    moongate_runtime::append_process_metrics(&mut out);
    out
}

/// Metrics of the disk tier.
fn write_disk(out: &mut String, disk: &NodeDisk) {
    let (counts, tier) = (&disk.counts, disk.tier.counts());
    let number = |count: &AtomicU64| count.load(Relaxed) as f64;
    let (done, failed) = (r#"{result="done"}"#, r#"{result="failed"}"#);
    for (name, help, well, badly) in [
        (
            "offloads",
            "Objects offloaded to disk at the master's request.",
            &counts.offloaded,
            &counts.not_offloaded,
        ),
        ("promotions", "Objects promoted from disk to memory.", &counts.promoted, &counts.not_promoted),
        ("disk_reads", "Read requests for objects on disk.", &counts.staged, &counts.not_staged),
    ] {
        let name = format!("moongate_store_{name}_total");
        family(out, &name, "counter", help, &[(done, number(well)), (failed, number(badly))]);
    }
    for (name, kind, help, value) in [
        ("disk_evicted_objects_total", "counter", "Objects evicted from disk.", tier.evicted),
        (
            "disk_corrupt_objects_total",
            "counter",
            "Objects and metadata pages on disk that failed their checksum.",
            tier.damaged,
        ),
        (
            "disk_quarantined_buffers",
            "gauge",
            "Buffers out of use because io_uring failed with operations in flight.",
            tier.quarantined_buffers,
        ),
        ("disk_objects", "gauge", "Objects on disk.", tier.objects),
        ("disk_bytes", "gauge", "Bytes of objects on disk.", tier.bytes),
        ("disk_capacity_bytes", "gauge", "Disk space reserved for objects.", disk.capacity),
    ] {
        family(out, &format!("moongate_store_{name}"), kind, help, &[("", value as f64)]);
    }
}
