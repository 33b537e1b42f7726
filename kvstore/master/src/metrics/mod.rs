//! `/metrics`: all metric families in the text format of Prometheus.
//!
//! Families without the prefix `moongate_` are those of Mooncake's master, with its types and labels, so that its dashboards work.
//! Families of features that this master does not have (NVMe over Fabrics) are present with the value 0.

mod calls;
mod extensions;
mod families;
mod text;

use crate::events::KvEventPublisher;
use crate::observer::ValueSizeHistogram;
use crate::server::MasterServer;
use text::MasterMetricsText;

/// The whole page. `sizes` are those of written objects; `publisher` publishes the KV events, if they are enabled.
pub(crate) fn text(
    server: &MasterServer,
    sizes: &ValueSizeHistogram,
    publisher: Option<&KvEventPublisher>,
) -> String {
    let mut text = MasterMetricsText::default();
    families::state(&mut text, server);
    families::value_sizes(&mut text, sizes);
    calls::all(&mut text, &server.counters);
    families::reads(&mut text, server);
    families::evictions(&mut text, server);
    families::tenants(&mut text, server);
    families::promotions(&mut text, server);
    families::unused(&mut text);
    extensions::all(&mut text, server, publisher);
    let mut text = text.finish();
    moongate_runtime::append_process_metrics(&mut text);
    text
}
