//! `/metrics`, in the text format of Prometheus.
//!
//! Families without `moongate_` in their names are those of Mooncake's master, with its types and labels, so that its dashboards work.
//! Those about what this master does not do (NVMe over fabrics) are there and zero.

mod calls;
mod extensions;
mod families;
mod text;

use crate::http::AdminContext;
use text::MasterMetricsText;

/// All families.
pub(crate) fn text(admin: &AdminContext) -> String {
    let mut text = MasterMetricsText::default();
    families::state(&mut text, admin);
    calls::all(&mut text, &admin.server.counters);
    families::reads(&mut text, admin);
    families::evictions(&mut text, admin);
    families::tenants(&mut text, admin);
    families::promotions(&mut text, admin);
    families::unused(&mut text);
    extensions::all(&mut text, admin);
    let mut text = text.finish();
    moongate_runtime::append_process_metrics(&mut text);
    text
}
