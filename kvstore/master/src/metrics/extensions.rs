//! Metric families that Mooncake's master does not have.

use mooncake_wire::rpc::RpcMethod;

use super::text::MasterMetricsText;
use crate::counters::{LATENCY_BUCKETS, latency_bound};
use crate::events::KvEventPublisher;
use crate::recovery::RecoveryOutcome;
use crate::server::MasterServer;

pub(super) fn all(text: &mut MasterMetricsText, server: &MasterServer, publisher: Option<&KvEventPublisher>) {
    latencies(text, server);
    state(text, server);
    storage(text, server);
    prefixes(text, server);
    capabilities(text, server);
    if let Some(publisher) = publisher {
        events(text, publisher);
    }
}

/// Latency histograms, only of RPCs that have been called.
fn latencies(text: &mut MasterMetricsText, server: &MasterServer) {
    let name = "moongate_master_rpc_duration_seconds";
    let mut family = text.histograms(name, "Time spent on a call, without the network.");
    for method in RpcMethod::ALL {
        let counts = server.counters.call_counts(*method);
        if counts.requests == 0 {
            continue;
        }
        let bound = |bucket| match latency_bound(bucket) {
            Some(bound) => bound.as_secs_f64().to_string(),
            None => "+Inf".to_owned(),
        };
        let buckets = (0..LATENCY_BUCKETS).map(bound).zip(counts.latency);
        family.histogram(&[("method", method.name())], buckets, counts.nanoseconds as f64 / 1e9);
    }
}

fn state(text: &mut MasterMetricsText, server: &MasterServer) {
    let (master, counts) = (&server.master, server.master.statistics());
    let largest = master.space_usage().largest_free;
    text.gauge(
        "moongate_master_largest_free_bytes",
        "Bytes of the largest object that fits without evicting anything.",
        largest,
    );
    let silent = master.client_counts().1;
    text.gauge(
        "moongate_master_silent_clients",
        "Clients with no recent heartbeat whose objects are still held.",
        silent,
    );
    text.counter("moongate_master_lost_keys_total", "Objects lost with their segments.", counts.lost_keys);
    text.counter(
        "moongate_master_hot_keys_total",
        "Objects classified as hot (read often).",
        counts.hot_keys,
    );
    let mut restores = text.counters(
        "moongate_master_restored_objects_total",
        "Objects offered by nodes to a master without its log, by outcome.",
    );
    for (outcome, count) in master.restore_counts() {
        restores.value(&[("outcome", outcome.label())], count);
    }
    text.counter(
        "moongate_master_upserts_in_place_total",
        "Upserts that overwrote the current version in place for lack of space for both; if they fail, it is lost.",
        master.statistics().upserts_in_place,
    );
    let unknown = server.counters.unknown_functions();
    text.counter("moongate_master_unknown_functions_total", "RPCs with an unknown function id.", unknown);
    let unknown = server.counters.unknown_arguments();
    text.counter(
        "moongate_master_unknown_arguments_total",
        "RPCs whose argument layout no known release has.",
        unknown,
    );
}

/// Zero unless client certificates are required.
fn capabilities(text: &mut MasterMetricsText, server: &MasterServer) {
    let [issued, without_key, unauthenticated] = server.capabilities.counts();
    text.counter(
        "moongate_master_capabilities_total",
        "Capabilities issued for memory ranges of nodes.",
        issued,
    );
    text.counter(
        "moongate_master_capabilities_without_key_total",
        "Ranges without a capability because the node has not sent the segment's key.",
        without_key,
    );
    text.counter(
        "moongate_master_unauthenticated_connections_total",
        "RPC connections rejected because TLS failed or the client had no certificate of the CA.",
        unauthenticated,
    );
}

/// Families of the data directory, only with --data_dir.
fn storage(text: &mut MasterMetricsText, server: &MasterServer) {
    let Some(storage) = server.journal.storage() else { return };
    if let Some(free) = storage.free_bytes {
        text.gauge(
            "moongate_master_data_free_bytes",
            "Free bytes on the file system of the data directory.",
            free,
        );
    }
    text.gauge(
        "moongate_master_data_write_failing",
        "1 while the log cannot be written.",
        u8::from(storage.failure.is_some()),
    );
    text.counter(
        "moongate_master_refused_writes_total",
        "Changes rejected because they could not be persisted; every object of a batch counts.",
        server.counters.refused_writes(),
    );
    let damage = storage.recovery.damage().cloned().unwrap_or_default();
    let is_damaged = storage.recovery.damage().is_some();
    text.counter(
        "moongate_master_data_damage_total",
        "1 if this process found damaged state files when it started.",
        u8::from(is_damaged),
    );
    text.counter(
        "moongate_master_data_damaged_bytes_total",
        "Bytes of the log that were unreadable at start.",
        damage.unreadable_bytes,
    );
    text.counter(
        "moongate_master_data_lost_changes_total",
        "Changes known to be missing in the log at start.",
        damage.missing_records,
    );
    text.counter(
        "moongate_master_data_unverified_objects_total",
        "Objects dropped at start because lost changes made them unverifiable.",
        damage.unverified_objects,
    );
    let torn_bytes = match storage.recovery {
        RecoveryOutcome::TornTail { bytes } => bytes,
        _ => 0,
    };
    text.counter(
        "moongate_master_data_torn_bytes_total",
        "Bytes of a torn log tail truncated at start.",
        torn_bytes,
    );
}

fn prefixes(text: &mut MasterMetricsText, server: &MasterServer) {
    let statistics = server.master.prefix_statistics();
    type PrefixValue = fn(&moongate_master_core::PrefixStatistics) -> u64;
    let families: [(&str, &str, PrefixValue); 2] = [
        ("moongate_master_prefix_keys", "Objects by key prefix.", |statistics| statistics.keys),
        ("moongate_master_prefix_bytes", "Bytes of objects by key prefix.", |statistics| statistics.bytes),
    ];
    // Keys without their own prefix entry share a label that no prefix has.
    let label = |statistics: &moongate_master_core::PrefixStatistics| {
        statistics.prefix.as_deref().unwrap_or("*").to_owned()
    };
    for (name, help, value_of) in families {
        let mut family = text.gauges(name, help);
        statistics
            .iter()
            .for_each(|statistics| family.value(&[("prefix", &label(statistics))], value_of(statistics)));
    }
    let mut hits = text.counters("moongate_master_prefix_hits_total", "Reads of objects by key prefix.");
    statistics.iter().for_each(|statistics| hits.value(&[("prefix", &label(statistics))], statistics.hits));
}

fn events(text: &mut MasterMetricsText, publisher: &KvEventPublisher) {
    let (status, socket) = (publisher.status(), publisher.socket());
    text.counter(
        "moongate_master_kv_event_messages_total",
        "KV event message sequence numbers assigned.",
        status.published_batches,
    );
    text.counter("moongate_master_kv_events_total", "KV events published.", status.published_events);
    text.counter(
        "moongate_master_kv_events_dropped_total",
        "KV events dropped from a full queue before publication.",
        status.dropped_events,
    );
    text.gauge(
        "moongate_master_kv_event_subscribers",
        "Connected subscribers of KV events.",
        socket.subscribers,
    );
    text.counter(
        "moongate_master_kv_event_messages_lost_total",
        "Messages dropped for slow subscribers, summed over all subscribers.",
        socket.dropped,
    );
}
