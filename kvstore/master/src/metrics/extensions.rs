//! Metric families that Mooncake's master does not have.

use mooncake_wire::admin::{DescribedObjects, ReturnHint};
use mooncake_wire::rpc::RpcMethod;
use moongate_master_core::{PrefixStatistics, TrialHits};
use moongate_runtime::metrics::{HistogramSnapshot, MetricsWriter};

use crate::counters::{LATENCY_BUCKETS, latency_bound};
use crate::events::KvEventPublisher;
use crate::recovery::RecoveryOutcome;
use crate::server::MasterServer;

pub(super) fn all(
    writer: &mut MetricsWriter<'_>,
    server: &MasterServer,
    publisher: Option<&KvEventPublisher>,
) {
    latencies(writer, server);
    state(writer, server);
    retention(writer, server);
    storage(writer, server);
    prefixes(writer, server);
    capabilities(writer, server);
    if let Some(publisher) = publisher {
        events(writer, publisher);
    }
}

/// Latency histograms, only of RPCs that have been called.
fn latencies(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let bound = |bucket| latency_bound(bucket).map_or(f64::INFINITY, |bound| bound.as_secs_f64());
    let calls = RpcMethod::ALL.iter().map(|method| (method, server.counters.call_counts(*method)));
    let histograms = calls.filter(|(_, counts)| counts.requests > 0).map(|(method, counts)| {
        let buckets = (0..LATENCY_BUCKETS).map(bound).zip(counts.latency).collect();
        (method.name(), HistogramSnapshot { buckets, sum: counts.nanoseconds as f64 / 1e9 })
    });
    writer.histogram_by(
        "moongate_master_rpc_duration_seconds",
        "Time spent on a call, without the network",
        "method",
        histograms,
    );
}

fn state(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let (master, counts) = (&server.master, server.master.statistics());
    let largest = master.space_usage().largest_free;
    writer.gauge(
        "moongate_master_largest_free_bytes",
        "Bytes of the largest object that fits without evicting anything",
        largest,
    );
    let silent = master.client_counts().silent;
    writer.gauge(
        "moongate_master_silent_clients",
        "Clients with no recent heartbeat whose objects are still held",
        silent,
    );
    writer.counter("moongate_master_lost_keys_total", "Objects lost with their segments", counts.lost_keys);
    writer.counter(
        "moongate_master_hot_keys_total",
        "Objects classified as hot (read often)",
        counts.hot_keys,
    );
    writer.counter_by(
        "moongate_master_restored_objects_total",
        "Objects offered by nodes to a master without its log, by outcome",
        "outcome",
        master.restore_counts().map(|(outcome, count)| (outcome.label(), count)),
    );
    writer.counter(
        "moongate_master_upserts_in_place_total",
        "Upserts that overwrote the current version in place for lack of space for both; if they fail, it is lost",
        master.statistics().upserts_in_place,
    );
    let unknown = server.counters.unknown_functions();
    writer.counter("moongate_master_unknown_functions_total", "RPCs with an unknown function id", unknown);
    let unknown = server.counters.unknown_arguments();
    writer.counter(
        "moongate_master_unknown_arguments_total",
        "RPCs whose argument layout no known release has",
        unknown,
    );
}

/// Which retention policy has more hits on the sampled keys. All are zero with `--retention_policy=lru`.
fn retention(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let TrialHits { uses, lru, learned } = server.master.retention_trial();
    writer.gauge(
        "moongate_master_retention_sampled_reads",
        "Recent reads of sampled keys that were used before",
        uses,
    );
    writer.gauge_by(
        "moongate_master_retention_sampled_hits",
        "Recent reads of sampled keys that each retention policy would have kept",
        "policy",
        [("learned", learned), ("lru", lru)],
    );
    let hints =
        [("unknown", ReturnHint::Unknown), ("never", ReturnHint::Never), ("expected", ReturnHint::Expected)];
    writer.counter_by(
        "moongate_master_described_prompts_total",
        "Prompts described by gateways, by the hint whether their prefix will be used again",
        "returns",
        hints.map(|(name, hint)| (name, server.counters.described_prompts(hint))),
    );
    let DescribedObjects { existing, announced } = server.counters.described_objects();
    writer.counter_by(
        "moongate_master_described_objects_total",
        "Objects of described prompts: existing, or announced because they had not been written yet",
        "state",
        [("existing", existing), ("announced", announced)],
    );
}

/// Zero unless client certificates are required.
fn capabilities(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let [issued, without_key, unauthenticated] = server.capabilities.counts();
    writer.counter(
        "moongate_master_capabilities_total",
        "Capabilities issued for memory ranges of nodes",
        issued,
    );
    writer.counter(
        "moongate_master_capabilities_without_key_total",
        "Ranges without a capability because the node has not sent the segment's key",
        without_key,
    );
    writer.counter(
        "moongate_master_unauthenticated_connections_total",
        "RPC connections rejected because TLS failed or the client had no certificate of the CA",
        unauthenticated,
    );
}

/// Families of the data directory, only with --data_dir.
fn storage(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let Some(storage) = server.journal.storage() else { return };
    if let Some(free) = storage.free_bytes {
        writer.gauge(
            "moongate_master_data_free_bytes",
            "Free bytes on the file system of the data directory",
            free,
        );
    }
    writer.gauge(
        "moongate_master_data_write_failing",
        "1 while the log cannot be written",
        u32::from(storage.failure.is_some()),
    );
    writer.counter(
        "moongate_master_refused_writes_total",
        "Changes rejected because they could not be persisted; every object of a batch counts",
        server.counters.refused_writes(),
    );
    let damage = storage.recovery.damage().cloned().unwrap_or_default();
    let is_damaged = storage.recovery.damage().is_some();
    writer.counter(
        "moongate_master_data_damage_total",
        "1 if this process found damaged state files when it started",
        u32::from(is_damaged),
    );
    writer.counter(
        "moongate_master_data_damaged_bytes_total",
        "Bytes of the log that were unreadable at start",
        damage.unreadable_bytes,
    );
    writer.counter(
        "moongate_master_data_lost_changes_total",
        "Changes known to be missing in the log at start",
        damage.missing_records,
    );
    writer.counter(
        "moongate_master_data_unverified_objects_total",
        "Objects dropped at start because lost changes made them unverifiable",
        damage.unverified_objects,
    );
    let torn_bytes = match storage.recovery {
        RecoveryOutcome::TornTail { bytes } => bytes,
        _ => 0,
    };
    writer.counter(
        "moongate_master_data_torn_bytes_total",
        "Bytes of a torn log tail truncated at start",
        torn_bytes,
    );
}

fn prefixes(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let statistics = server.master.prefix_statistics();
    // Keys without their own prefix entry share a label that no prefix has.
    let values = |value_of: fn(&PrefixStatistics) -> u64| {
        statistics.iter().map(move |of| (of.prefix.as_deref().unwrap_or("*"), value_of(of)))
    };
    let keys = values(|of| of.keys);
    writer.gauge_by("moongate_master_prefix_keys", "Objects by key prefix", "prefix", keys);
    let bytes = values(|of| of.bytes);
    writer.gauge_by("moongate_master_prefix_bytes", "Bytes of objects by key prefix", "prefix", bytes);
    let hits = values(|of| of.hits);
    writer.counter_by("moongate_master_prefix_hits_total", "Reads of objects by key prefix", "prefix", hits);
}

fn events(writer: &mut MetricsWriter<'_>, publisher: &KvEventPublisher) {
    let (status, socket) = (publisher.status(), publisher.socket());
    writer.counter(
        "moongate_master_kv_event_messages_total",
        "KV event message sequence numbers assigned",
        status.published_batches,
    );
    writer.counter("moongate_master_kv_events_total", "KV events published", status.published_events);
    writer.counter(
        "moongate_master_kv_events_dropped_total",
        "KV events dropped from a full queue before publication",
        status.dropped_events,
    );
    writer.gauge(
        "moongate_master_kv_event_subscribers",
        "Connected subscribers of KV events",
        socket.subscribers,
    );
    writer.counter(
        "moongate_master_kv_event_messages_lost_total",
        "Messages dropped for slow subscribers, summed over all subscribers",
        socket.dropped,
    );
}
