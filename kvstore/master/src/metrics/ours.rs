//! What Mooncake's master does not tell.

use mooncake_wire::rpc::Method;

use super::text::Text;
use crate::count::{LATENCY_BUCKETS, latency_bound};
use crate::http::Admin;

pub(super) fn all(text: &mut Text, admin: &Admin) {
    latencies(text, admin);
    state(text, admin);
    prefixes(text, admin);
    events(text, admin);
}

/// Only of RPCs that have been called.
fn latencies(text: &mut Text, admin: &Admin) {
    let name = "moongate_master_rpc_duration_seconds";
    let mut family = text.histograms(name, "Time spent on a call, without the network.");
    for method in Method::ALL {
        let counts = admin.server.counters.of(*method);
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

fn state(text: &mut Text, admin: &Admin) {
    let server = &admin.server;
    let (master, counts) = (&server.master, server.master.counts());
    let largest = master.fill().largest_free;
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
    let unknown = server.counters.unknown_functions();
    text.counter("moongate_master_unknown_functions_total", "Calls of RPCs that no release has.", unknown);
    let unknown = server.counters.unknown_arguments();
    text.counter(
        "moongate_master_unknown_arguments_total",
        "Calls with arguments that no known release sends.",
        unknown,
    );
}

fn prefixes(text: &mut Text, admin: &Admin) {
    let statistics = admin.server.master.prefix_statistics();
    type Figure = fn(&moongate_kvcore::PrefixStatistics) -> u64;
    let families: [(&str, &str, Figure); 2] = [
        ("moongate_master_prefix_keys", "Objects, by the beginnings of their keys.", |it| it.keys),
        ("moongate_master_prefix_bytes", "Bytes of objects, by the beginnings of their keys.", |it| it.bytes),
    ];
    // All keys that are not told apart by their beginning are together under a name that no beginning has.
    let label = |it: &moongate_kvcore::PrefixStatistics| it.prefix.as_deref().unwrap_or("*").to_owned();
    for (name, help, figure) in families {
        let mut family = text.gauges(name, help);
        statistics.iter().for_each(|it| family.value(&[("prefix", &label(it))], figure(it)));
    }
    let mut hits = text
        .counters("moongate_master_prefix_hits_total", "Reads of objects, by the beginnings of their keys.");
    statistics.iter().for_each(|it| hits.value(&[("prefix", &label(it))], it.hits));
}

fn events(text: &mut Text, admin: &Admin) {
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
        socket.lost,
    );
}
