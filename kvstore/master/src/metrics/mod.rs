//! `/metrics`: all metric families in Prometheus' text format 0.0.4, which Mooncake serves: several of its counters do not end in
//! `_total`, so OpenMetrics has no type for them.
//!
//! Families without the prefix `moongate_` are those of Mooncake's master, with its types and labels, so that its dashboards work.
//! Families of features that this master does not have (NVMe over Fabrics) are present with the value 0.

mod calls;
mod extensions;
mod families;
mod process_memory;

use std::sync::Arc;

use moongate_runtime::metrics::MetricsRegistry;

use crate::events::KvEventPublisher;
use crate::observer::FactObserver;
use crate::server::MasterServer;

/// The whole page. `publisher` publishes the KV events, if they are enabled.
pub(crate) fn text(
    server: &Arc<MasterServer>,
    observer: &Arc<FactObserver>,
    publisher: Option<&Arc<KvEventPublisher>>,
) -> String {
    let (server, observer, publisher) = (server.clone(), observer.clone(), publisher.cloned());
    let mut registry = MetricsRegistry::default();
    registry.collect(move |writer| {
        families::all(writer, &server, &observer);
        process_memory::all(writer);
        calls::all(writer, &server.counters);
        extensions::all(writer, &server, publisher.as_deref());
    });
    registry.prometheus_text()
}
