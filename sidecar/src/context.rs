//! State shared by the sidecar's tasks.

use moongate_runtime::{ClientTls, Supervisor};
use tokio::sync::{Notify, watch};

use crate::options::SidecarOptions;
use crate::registrations::GatewayRegistrations;
use crate::removal_cost::RecentCacheHits;
use crate::state::SidecarState;

/// State shared by all tasks.
pub(crate) struct SidecarContext {
    pub(crate) options: SidecarOptions,
    /// HTTP client for the engine.
    pub(crate) client: reqwest::Client,
    pub(crate) engine_trust: ClientTls,
    pub(crate) gateway_trust: ClientTls,
    pub(crate) state: watch::Sender<SidecarState>,
    /// Notified to poll the engine immediately.
    pub(crate) drain_requested: Notify,
    pub(crate) registrations: GatewayRegistrations,
    pub(crate) recent_cache_hits: RecentCacheHits,
    pub(crate) supervisor: Supervisor,
}
