//! Health and metrics over HTTP.

use std::fmt::Write as _;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;

use crate::disk::NodeDisk;
use crate::node::NodeContext;

/// All routes.
pub(crate) fn router() -> Router<NodeContext> {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/metrics/summary", get(summary))
}

/// As Mooncake's clients answer it.
async fn health(State(shared): State<NodeContext>) -> Response {
    let (status, code, text) = if shared.heartbeat.is_healthy() {
        (StatusCode::OK, 0, "healthy")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, 2, "master_unreachable")
    };
    let body = format!(r#"{{"status":"{text}","code":{code}}}"#);
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

async fn metrics(State(shared): State<NodeContext>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text(&shared)).into_response()
}

async fn summary(State(shared): State<NodeContext>) -> Response {
    let counts = shared.serving.counts().snapshot();
    let body = format!(
        "lends={} B in {} segments | reads: {} ({} B) | writes: {} ({} B) | refused: {} | failed: {} | connections: {} | master: {}\n",
        shared.membership.pool.bytes(),
        shared.membership.pool.segments().len(),
        counts.reads,
        counts.read_bytes,
        counts.writes,
        counts.written_bytes,
        counts.rejected,
        counts.failed,
        shared.serving.open(),
        if shared.heartbeat.is_healthy() { "reachable" } else { "unreachable" },
    );
    ([(header::CONTENT_TYPE, "text/plain")], body).into_response()
}

/// A family with its samples: labels in braces or nothing, and the value.
fn family(out: &mut String, name: &str, kind: &str, help: &str, samples: &[(&str, f64)]) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (labels, value) in samples {
        let _ = writeln!(out, "{name}{labels} {value}");
    }
}

fn text(shared: &NodeContext) -> String {
    let counts = shared.serving.counts().snapshot();
    let (pulse, tasks, scrubbed) = (&shared.heartbeat, &shared.task_counts, &shared.scrub_counts);
    let number = |value: u64| value as f64;
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let mut out = String::new();
    let mut counter = |name: &str, help: &str, samples: &[(&str, f64)]| {
        family(&mut out, &format!("moongate_store_{name}_total"), "counter", help, samples);
    };
    let (read, write) = (r#"{operation="read"}"#, r#"{operation="write"}"#);
    counter(
        "transfers",
        "Transfers with clients and other nodes that have ended well: `read`, `write`.",
        &[(read, number(counts.reads)), (write, number(counts.writes))],
    );
    counter(
        "transfer_bytes",
        "Bytes of transfers that have ended well.",
        &[(read, number(counts.read_bytes)), (write, number(counts.written_bytes))],
    );
    counter(
        "transfer_seconds",
        "Time of transfers that have ended well, from the header to the last byte.",
        &[(read, seconds(counts.read_nanos)), (write, seconds(counts.write_nanos))],
    );
    counter(
        "transfers_by_protocol",
        "Transfers that have ended well: in Mooncake's two forms (`v1`, `v2`), and with checksums (`checked`).",
        &[
            (r#"{protocol="v1"}"#, number(counts.v1)),
            (r#"{protocol="v2"}"#, number(counts.v2)),
            (r#"{protocol="checked"}"#, number(counts.checked)),
        ],
    );
    counter(
        "transfer_failures",
        "Transfers that have not ended well: `rejected` (outside the memory), `broken` (connections), `damaged` (wrong checksums), `malformed` (not the protocol), `unfinished` (reads of what a client had not written to its end). With certificates also `forged`, `expired`, `range` and `rights`: capabilities that were refused.",
        &[
            (r#"{reason="rejected"}"#, number(counts.rejected)),
            (r#"{reason="broken"}"#, number(counts.failed)),
            (r#"{reason="damaged"}"#, number(counts.damaged)),
            (r#"{reason="malformed"}"#, number(counts.malformed)),
            (r#"{reason="unfinished"}"#, number(counts.unfinished)),
            (r#"{reason="forged"}"#, number(counts.refused_forged)),
            (r#"{reason="expired"}"#, number(counts.refused_expired)),
            (r#"{reason="range"}"#, number(counts.refused_range)),
            (r#"{reason="rights"}"#, number(counts.refused_rights)),
        ],
    );
    counter(
        "delayed_reads",
        "Reads that waited until what had arrived before them in the protocol without acknowledgements (`v1`) was in memory.",
        &[("", number(counts.delayed_reads))],
    );
    counter(
        "connections_refused",
        "Connections that were not taken or were closed for others: `not_allowed` (`--allow-peers`), `too_many`, `silent` (no request on them), `unauthenticated` (TLS failed, or there was no certificate of the authority).",
        &[
            (r#"{reason="not_allowed"}"#, number(counts.not_allowed)),
            (r#"{reason="too_many"}"#, number(counts.over_limit)),
            (r#"{reason="silent"}"#, number(counts.evicted)),
            (r#"{reason="unauthenticated"}"#, number(counts.unauthenticated)),
        ],
    );
    counter(
        "refused_api_calls",
        "Calls of the REST API that were refused: not from this machine, or without the token.",
        &[("", number(shared.refused_calls.load(Relaxed)))],
    );
    counter(
        "heartbeats",
        "Heartbeats by whether the master has answered.",
        &[
            (r#"{answered="true"}"#, number(pulse.succeeded.load(Relaxed))),
            (r#"{answered="false"}"#, number(pulse.failed.load(Relaxed))),
        ],
    );
    counter(
        "remounts",
        "How often the master had forgotten this node.",
        &[("", number(pulse.remounts.load(Relaxed)))],
    );
    counter(
        "tasks",
        "Copies and moves that the master has asked for: `done`, `failed`.",
        &[
            (r#"{result="done"}"#, number(tasks.done.load(Relaxed))),
            (r#"{result="failed"}"#, number(tasks.failed.load(Relaxed))),
        ],
    );
    counter(
        "task_bytes",
        "Bytes of copies and moves for the master.",
        &[("", number(tasks.bytes.load(Relaxed)))],
    );
    counter(
        "scrubbed_bytes",
        "Bytes that were read again to find bits that have changed.",
        &[("", number(scrubbed.bytes.load(Relaxed)))],
    );
    counter(
        "damaged_ranges",
        "Ranges of which bits had changed.",
        &[("", number(scrubbed.damaged.load(Relaxed)))],
    );
    let catalog = shared.membership.pool.catalog_counts();
    counter(
        "catalog_dropped_records",
        "Records of objects that a master without its log cannot be offered: `damaged` (failed their checksum), `stale` (their range was overwritten or lost before this process began), `unrecorded` (no slot, or the key is too long), `unproven` (their bytes were never all there), `unconfirmed` (the master does not have them).",
        &[
            (r#"{reason="damaged"}"#, number(catalog.damaged)),
            (r#"{reason="stale"}"#, number(catalog.stale)),
            (r#"{reason="unrecorded"}"#, number(catalog.unrecorded)),
            (r#"{reason="unproven"}"#, number(shared.catalog_sync_counts.unproven.load(Relaxed))),
            (r#"{reason="unconfirmed"}"#, number(shared.catalog_sync_counts.unconfirmed.load(Relaxed))),
        ],
    );
    counter(
        "catalog_recorded_objects",
        "Objects that were recorded for a master without its log.",
        &[("", number(shared.catalog_sync_counts.recorded.load(Relaxed)))],
    );
    if let Some(keeper) = &shared.disk_worker {
        write_disk(&mut out, &keeper.disk);
    }
    let mut gauge = |name: &str, help: &str, value: f64| {
        family(&mut out, &format!("moongate_store_{name}"), "gauge", help, &[("", value)]);
    };
    gauge("lent_bytes", "Bytes that are lent.", number(shared.membership.pool.bytes()));
    gauge(
        "catalog_objects",
        "Objects that a master without its log can be offered.",
        number(catalog.objects),
    );
    gauge("segments", "Segments that are lent.", shared.membership.pool.segments().len() as f64);
    gauge("connections", "Connections for transfers that are open.", shared.serving.open() as f64);
    gauge(
        "master_reachable",
        "Whether the master has answered the last heartbeat.",
        f64::from(u8::from(shared.heartbeat.is_healthy())),
    );
    moongate_runtime::append_process_metrics(&mut out);
    out
}

/// What is on the disk, and what has become of objects there.
fn write_disk(out: &mut String, disk: &NodeDisk) {
    let (counts, held) = (&disk.counts, disk.tier.counts());
    let number = |count: &AtomicU64| count.load(Relaxed) as f64;
    let (done, failed) = (r#"{result="done"}"#, r#"{result="failed"}"#);
    for (name, help, well, badly) in [
        ("offloads", "Objects that the master wanted on the disk.", &counts.offloaded, &counts.not_offloaded),
        ("promotions", "Objects that the master wanted back.", &counts.promoted, &counts.not_promoted),
        ("disk_reads", "Questions of readers for objects on the disk.", &counts.staged, &counts.not_staged),
    ] {
        let name = format!("moongate_store_{name}_total");
        family(out, &name, "counter", help, &[(done, number(well)), (failed, number(badly))]);
    }
    for (name, kind, help, value) in [
        ("disk_evicted_objects_total", "counter", "Objects that made room for others.", held.evicted),
        (
            "disk_damaged_objects_total",
            "counter",
            "Objects that failed their checksum, and damaged pages about objects.",
            held.damaged,
        ),
        (
            "disk_quarantined_buffers",
            "gauge",
            "Buffers out of use since io_uring failed with operations under way.",
            held.quarantined_buffers,
        ),
        ("disk_objects", "gauge", "Objects on the disk.", held.objects),
        ("disk_bytes", "gauge", "Bytes of objects on the disk.", held.bytes),
        ("disk_capacity_bytes", "gauge", "Bytes of the disk that are for objects.", disk.capacity),
    ] {
        family(out, &format!("moongate_store_{name}"), kind, help, &[("", value as f64)]);
    }
}
