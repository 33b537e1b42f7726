//! Runs a master with the settings of its command line, until it is stopped.

mod ha_master;
mod standalone;

use std::net::SocketAddr;

use crate::aux_services::{
    AuxServicesOptions, KvEventServiceOptions, MetadataLocation, MetadataServiceOptions,
};
use crate::flags::{KvEventFlags, MetadataFlags};

pub use ha_master::{HaStartError, RunningHaMaster, release_lease_after_exit, start_ha};
pub use standalone::{MasterStartError, RunningMaster, start};

/// Default queue length for KV events: some 200 MB.
const DEFAULT_EVENT_QUEUE: usize = 1 << 20;

/// Builds the settings of the services other than RPC.
fn service_options(
    admin: SocketAddr,
    metadata: Option<MetadataFlags>,
    events: Option<KvEventFlags>,
) -> AuxServicesOptions {
    let metadata = metadata.map(|flags| {
        let location = flags.folder.map_or(MetadataLocation::Memory, MetadataLocation::Folder);
        MetadataServiceOptions { address: flags.address, location, cleanup: flags.cleanup }
    });
    let events = events.and_then(|flags| {
        if flags.bind.is_empty() {
            tracing::warn!("KV events disabled: --enable_kv_events needs --kv_events_bind_endpoint");
            return None;
        }
        if !flags.legacy || !flags.keys {
            tracing::warn!("KV events always have all members: --nokv_events_emit_… has no effect");
        }
        let queue = flags.queue.unwrap_or(DEFAULT_EVENT_QUEUE);
        Some(KvEventServiceOptions {
            bind: flags.bind,
            replay: flags.replay,
            backend: flags.backend_id,
            labels: flags.labels,
            queue,
        })
    });
    AuxServicesOptions { admin, metadata, events, quotas: None }
}

/// Logs the flags that have no effect.
fn log_flags(ignored: &[String], unsupported: &[(String, &str)]) {
    if !ignored.is_empty() {
        tracing::debug!(flags = ignored.join(" "), "ignored flags");
    }
    for (flag, help) in unsupported {
        tracing::warn!(flag, help, "a flag of Mooncake's master is not supported and has no effect");
    }
}
