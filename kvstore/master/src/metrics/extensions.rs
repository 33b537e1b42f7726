//! What Mooncake's master does not tell.

use mooncake_wire::rpc::RpcMethod;

use super::text::MasterMetricsText;
use crate::counters::{LATENCY_BUCKETS, latency_bound};
use crate::durable::RecoveryOutcome;
use crate::http::AdminContext;

pub(super) fn all(text: &mut MasterMetricsText, admin: &AdminContext) {
    latencies(text, admin);
    state(text, admin);
    storage(text, admin);
    prefixes(text, admin);
    capabilities(text, admin);
    events(text, admin);
}

/// Only of RPCs that have been called.
fn latencies(text: &mut MasterMetricsText, admin: &AdminContext) {
    let name = "moongate_master_rpc_duration_seconds";
    let mut family = text.histograms(name, "Time spent on a call, without the network.");
    for method in RpcMethod::ALL {
        let counts = admin.server.counters.call_counts(*method);
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

fn state(text: &mut MasterMetricsText, admin: &AdminContext) {
    let server = &admin.server;
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
        "Clients that are not heard of, and whose objects are kept.",
        silent,
    );
    text.counter(
        "moongate_master_lost_keys_total",
        "Objects that were lost with their segments.",
        counts.lost_keys,
    );
    text.counter(
        "moongate_master_hot_keys_total",
        "Objects that were found to be read often.",
        counts.hot_keys,
    );
    let mut restores = text.counters(
        "moongate_master_restored_objects_total",
        "Objects that nodes have offered to a master without its log, by what became of them.",
    );
    for (outcome, count) in master.restore_counts() {
        restores.value(&[("outcome", outcome.label())], count);
    }
    text.counter(
        "moongate_master_upserts_in_place_total",
        "Upserts that overwrote the present version in place, because there was no space for both: it is lost if they fail.",
        master.statistics().upserts_in_place,
    );
    let unknown = server.counters.unknown_functions();
    text.counter("moongate_master_unknown_functions_total", "Calls of RPCs that no release has.", unknown);
    let unknown = server.counters.unknown_arguments();
    text.counter(
        "moongate_master_unknown_arguments_total",
        "Calls with arguments that no known release sends.",
        unknown,
    );
}

/// Zero unless callers need certificates.
fn capabilities(text: &mut MasterMetricsText, admin: &AdminContext) {
    let [issued, without_key, unauthenticated] = admin.server.capabilities.counts();
    text.counter(
        "moongate_master_capabilities_total",
        "Capabilities that were issued for ranges of nodes' memory.",
        issued,
    );
    text.counter(
        "moongate_master_capabilities_without_key_total",
        "Ranges for which no capability was issued, because the node had not sent the segment's key.",
        without_key,
    );
    text.counter(
        "moongate_master_unauthenticated_connections_total",
        "RPC connections that were refused: TLS failed, or the client had no certificate of the authority.",
        unauthenticated,
    );
}

/// Only of a master with files.
fn storage(text: &mut MasterMetricsText, admin: &AdminContext) {
    let server = &admin.server;
    let Some(storage) = server.journal.storage() else { return };
    if let Some(free) = storage.free_bytes {
        text.gauge("moongate_master_data_free_bytes", "Free bytes on the disk with the state's files.", free);
    }
    text.gauge(
        "moongate_master_data_failing",
        "1 while changes cannot be written to the state's files.",
        u8::from(storage.failure.is_some()),
    );
    text.counter(
        "moongate_master_refused_writes_total",
        "Changes that were refused because they could not be written, each object of a batch counted.",
        server.counters.refused_writes(),
    );
    let damage = storage.recovery.damage().cloned().unwrap_or_default();
    let is_damaged = storage.recovery.damage().is_some();
    text.counter(
        "moongate_master_data_damage_total",
        "Starts of this process that found files of the state damaged.",
        u8::from(is_damaged),
    );
    text.counter(
        "moongate_master_data_damaged_bytes_total",
        "Bytes of the log of changes that could not be read at the start.",
        damage.unreadable_bytes,
    );
    text.counter(
        "moongate_master_data_lost_changes_total",
        "Changes that are known to have been missing in the log at the start.",
        damage.missing_records,
    );
    text.counter(
        "moongate_master_data_unproven_keys_total",
        "Objects that are absent since the start because changes were lost.",
        damage.unproven_keys,
    );
    let torn = match storage.recovery {
        RecoveryOutcome::TornTail { bytes } => bytes,
        _ => 0,
    };
    text.counter(
        "moongate_master_data_torn_bytes_total",
        "Bytes of an unanswered change that a crash left and the start cut off.",
        torn,
    );
}

fn prefixes(text: &mut MasterMetricsText, admin: &AdminContext) {
    let statistics = admin.server.master.prefix_statistics();
    type Figure = fn(&moongate_master_core::PrefixStatistics) -> u64;
    let families: [(&str, &str, Figure); 2] = [
        ("moongate_master_prefix_keys", "Objects, by the beginnings of their keys.", |it| it.keys),
        ("moongate_master_prefix_bytes", "Bytes of objects, by the beginnings of their keys.", |it| it.bytes),
    ];
    // All keys that are not told apart by their beginning are together under a name that no beginning has.
    let label = |it: &moongate_master_core::PrefixStatistics| it.prefix.as_deref().unwrap_or("*").to_owned();
    for (name, help, figure) in families {
        let mut family = text.gauges(name, help);
        statistics.iter().for_each(|it| family.value(&[("prefix", &label(it))], figure(it)));
    }
    let mut hits = text
        .counters("moongate_master_prefix_hits_total", "Reads of objects, by the beginnings of their keys.");
    statistics.iter().for_each(|it| hits.value(&[("prefix", &label(it))], it.hits));
}

fn events(text: &mut MasterMetricsText, admin: &AdminContext) {
    let Some(events) = &admin.events else { return };
    let (status, socket) = (events.status(), events.socket());
    text.counter(
        "moongate_master_kv_event_messages_total",
        "Numbers of messages of KV events that have been given out.",
        status.published_batches,
    );
    text.counter(
        "moongate_master_kv_events_total",
        "KV events that were published.",
        status.published_events,
    );
    text.counter(
        "moongate_master_kv_events_dropped_total",
        "KV events that were dropped before they were published.",
        status.dropped_events,
    );
    text.gauge("moongate_master_kv_event_subscribers", "Subscribers of KV events.", socket.subscribers);
    text.counter(
        "moongate_master_kv_event_messages_lost_total",
        "Messages that a subscriber was too slow for, counted for each subscriber.",
        socket.dropped,
    );
}
