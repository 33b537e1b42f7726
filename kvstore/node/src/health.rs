//! Health and metrics over HTTP.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use moongate_runtime::metrics::{MetricsRegistry, MetricsWriter};
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

fn text(node: &NodeMetrics) -> String {
    let mut registry = MetricsRegistry::default();
    let node = node.clone();
    registry.collect(move |writer| {
        write_transfers(writer, &node);
        write_master_calls(writer, &node);
        write_segments(writer, &node);
        if let Some(disk) = &node.disk {
            write_disk(writer, disk);
        }
    });
    registry.prometheus_text()
}

/// Metrics of transfers with clients and other nodes.
fn write_transfers(writer: &mut MetricsWriter<'_>, node: &NodeMetrics) {
    let counts = node.serving.counts().snapshot();
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    writer.counter_by(
        "moongate_store_transfers_total",
        "Completed transfers with clients and other nodes: `read`, `write`",
        "operation",
        [("read", counts.reads), ("write", counts.writes)],
    );
    writer.counter_by(
        "moongate_store_transfer_bytes_total",
        "Bytes of completed transfers",
        "operation",
        [("read", counts.read_bytes), ("write", counts.written_bytes)],
    );
    writer.counter_by(
        "moongate_store_transfer_seconds_total",
        "Time of completed transfers, from the header to the last byte",
        "operation",
        [("read", seconds(counts.read_nanos)), ("write", seconds(counts.write_nanos))],
    );
    writer.counter_by(
        "moongate_store_transfers_by_protocol_total",
        "Completed transfers by protocol version: Mooncake's two (`v1`, `v2`), and Moongate's with checksums (`checked`) and through shared memory (`mapped`)",
        "protocol",
        [("v1", counts.v1), ("v2", counts.v2), ("checked", counts.checked), ("mapped", counts.mapped)],
    );
    writer.counter_by(
        "moongate_store_transfer_failures_total",
        "Failed transfers: `rejected` (address outside the segments), `broken` (connection lost), `damaged` (checksum mismatch), `malformed` (protocol error), `unfinished` (reads of incompletely written ranges). With certificates also rejected capabilities: `invalid_signature`, `expired`, `out_of_range` and `wrong_operation`",
        "reason",
        [
            ("rejected", counts.rejected),
            ("broken", counts.failed),
            ("damaged", counts.damaged),
            ("malformed", counts.malformed),
            ("unfinished", counts.unfinished),
            ("invalid_signature", counts.refused_forged),
            ("expired", counts.refused_expired),
            ("out_of_range", counts.refused_range),
            ("wrong_operation", counts.refused_rights),
        ],
    );
    writer.counter(
        "moongate_store_delayed_reads_total",
        "Reads that waited for earlier writes on `v1` connections, which have no acknowledgements",
        counts.delayed_reads,
    );
    writer.counter_by(
        "moongate_store_connections_refused_total",
        "Connections that were refused or closed: `not_allowed` (`--allow-peers`), `connection_limit`, `idle` (closed without a request, to free a slot), `unauthenticated` (TLS failed, or no certificate of the configured CA)",
        "reason",
        [
            ("not_allowed", counts.not_allowed),
            ("connection_limit", counts.over_limit),
            ("idle", counts.evicted),
            ("unauthenticated", counts.unauthenticated),
        ],
    );
    let open = node.serving.open();
    writer.gauge("moongate_store_connections", "Open connections for transfers", open);
}

/// Metrics of the REST API, and of the connection to the master.
fn write_master_calls(writer: &mut MetricsWriter<'_>, node: &NodeMetrics) {
    let (heartbeat, tasks) = (&node.heartbeat, &node.task_counts);
    writer.counter(
        "moongate_store_api_requests_rejected_total",
        "REST API requests that were rejected: not from this machine, or without the token",
        node.refused_calls.load(Relaxed),
    );
    writer.counter_by(
        "moongate_store_heartbeats_total",
        "Heartbeats to the master: `done`, `failed`",
        "result",
        done_or_failed(&heartbeat.succeeded, &heartbeat.failed),
    );
    writer.counter(
        "moongate_store_remounts_total",
        "Times the node mounted its segments again because the master had expired it",
        heartbeat.remounts.load(Relaxed),
    );
    writer.counter_by(
        "moongate_store_tasks_total",
        "Copy and move tasks from the master: `done`, `failed`",
        "result",
        done_or_failed(&tasks.done, &tasks.failed),
    );
    writer.counter(
        "moongate_store_task_bytes_total",
        "Bytes transferred by copy and move tasks",
        tasks.bytes.load(Relaxed),
    );
    writer.gauge(
        "moongate_store_master_reachable",
        "1 if the master answered the last heartbeat, else 0",
        u32::from(heartbeat.is_healthy()),
    );
}

/// Metrics of the segments and of the catalog of their objects.
fn write_segments(writer: &mut MetricsWriter<'_>, node: &NodeMetrics) {
    let (scrubbed, catalog, synced) =
        (&node.scrub_counts, node.pool.catalog_counts(), &node.catalog_sync_counts);
    writer.gauge("moongate_store_segments", "Mounted segments", node.pool.segments().len());
    writer.gauge("moongate_store_segment_bytes", "Bytes of mounted segments", node.pool.bytes());
    writer.counter(
        "moongate_store_scrubbed_bytes_total",
        "Bytes re-read in the background to detect corruption",
        scrubbed.bytes.load(Relaxed),
    );
    writer.counter(
        "moongate_store_corrupt_ranges_total",
        "Ranges that failed their checksum",
        scrubbed.damaged.load(Relaxed),
    );
    writer.counter_by(
        "moongate_store_catalog_dropped_records_total",
        "Object records that cannot be offered to a master that lost its log: `damaged` (failed their checksum), `stale` (range overwritten or lost before this process started), `unrecorded` (no slot, or the key is too long), `unverified` (bytes incomplete), `unconfirmed` (not in the master)",
        "reason",
        [
            ("damaged", catalog.damaged),
            ("stale", catalog.stale),
            ("unrecorded", catalog.unrecorded),
            ("unverified", synced.unproven.load(Relaxed)),
            ("unconfirmed", synced.unconfirmed.load(Relaxed)),
        ],
    );
    writer.counter(
        "moongate_store_catalog_recorded_objects_total",
        "Objects recorded in the catalog, from which a master that lost its log is restored",
        synced.recorded.load(Relaxed),
    );
    writer.gauge(
        "moongate_store_catalog_objects",
        "Objects that can be offered to a master that lost its log",
        catalog.objects,
    );
}

/// Metrics of the disk tier.
fn write_disk(writer: &mut MetricsWriter<'_>, disk: &NodeDisk) {
    let (counts, tier) = (&disk.counts, disk.tier.counts());
    writer.counter_by(
        "moongate_store_offloads_total",
        "Objects offloaded to disk at the master's request",
        "result",
        done_or_failed(&counts.offloaded, &counts.not_offloaded),
    );
    writer.counter_by(
        "moongate_store_promotions_total",
        "Objects promoted from disk to memory",
        "result",
        done_or_failed(&counts.promoted, &counts.not_promoted),
    );
    writer.counter_by(
        "moongate_store_disk_reads_total",
        "Read requests for objects on disk",
        "result",
        done_or_failed(&counts.staged, &counts.not_staged),
    );
    writer.counter("moongate_store_disk_evicted_objects_total", "Objects evicted from disk", tier.evicted);
    writer.counter(
        "moongate_store_disk_corrupt_objects_total",
        "Objects and metadata pages on disk that failed their checksum",
        tier.damaged,
    );
    writer.gauge(
        "moongate_store_disk_quarantined_buffers",
        "Buffers out of use because io_uring failed with operations in flight",
        tier.quarantined_buffers,
    );
    writer.gauge("moongate_store_disk_objects", "Objects on disk", tier.objects);
    writer.gauge("moongate_store_disk_bytes", "Bytes of objects on disk", tier.bytes);
    writer.gauge("moongate_store_disk_capacity_bytes", "Disk space reserved for objects", disk.capacity);
}

fn done_or_failed(done: &AtomicU64, failed: &AtomicU64) -> [(&'static str, u64); 2] {
    [("done", done.load(Relaxed)), ("failed", failed.load(Relaxed))]
}
