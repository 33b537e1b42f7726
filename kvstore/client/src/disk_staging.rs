//! Reads objects that are only on a node's disk: the node stages them in its memory for a limited time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moongate_master_client::rpc::{self, DiskNodeClient, MasterClient, StoreCredentials};
use moongate_runtime::Supervisor;
use parking_lot::Mutex;

use crate::client::KvClient;
use crate::error::NodeError;
use crate::locate::{ObjectLocation, ReplicaSource};

/// Maximum number of cached node clients. When it is reached, all are dropped.
const MAX_NODES: usize = 1024;

/// Clients of nodes with disks, by the address of their port for disk reads.
#[derive(Default)]
pub(crate) struct DiskNodeTable(Mutex<HashMap<Arc<str>, DiskNodeClient>>);

impl DiskNodeTable {
    fn get(
        &self,
        endpoint: &Arc<str>,
        options: rpc::MasterClientOptions,
        authentication: Option<&StoreCredentials>,
        supervisor: &Supervisor,
    ) -> DiskNodeClient {
        let mut nodes = self.0.lock();
        if nodes.len() >= MAX_NODES && !nodes.contains_key(endpoint) {
            nodes.clear();
        }
        let new = || {
            let authentication = authentication.cloned();
            DiskNodeClient::new(MasterClient::authenticated(endpoint, options, authentication, supervisor))
        };
        nodes.entry(Arc::clone(endpoint)).or_insert_with(new).clone()
    }
}

/// An object staged in a node's memory, released when this is dropped.
pub(crate) struct StagedObjectGuard {
    node: DiskNodeClient,
    batch: u64,
    expires_at: Instant,
    supervisor: Supervisor,
}

impl StagedObjectGuard {
    /// Whether the staged object has not expired yet.
    pub(crate) fn is_valid(&self) -> bool {
        Instant::now() < self.expires_at
    }
}

impl Drop for StagedObjectGuard {
    fn drop(&mut self) {
        let (node, batch) = (self.node.clone(), self.batch);
        self.supervisor.spawn("kv-release", async move {
            if let Err(error) = node.release(batch).await {
                tracing::debug!(%error, "cannot release a staged object; it expires by itself");
            }
        });
    }
}

impl KvClient {
    /// If an object is only on disk, has the node stage it, and adds the staged copy as source.
    pub(crate) async fn stage(
        &self,
        key: &str,
        located: &mut ObjectLocation,
    ) -> Result<Option<StagedObjectGuard>, NodeError> {
        let Some(endpoint) = located.disk.as_ref().filter(|_| located.sources.is_empty()) else {
            return Ok(None);
        };
        let (shared, requested_at) = (&*self.shared, Instant::now());
        let options = rpc::MasterClientOptions { connections: 1, ..shared.options.master };
        let node = shared.disk_nodes.get(
            endpoint,
            options,
            shared.options.authentication.as_ref(),
            &shared.supervisor,
        );
        let staged = node.stage(&shared.options.tenant, key, located.size as u64).await;
        let staged = staged
            .map_err(|error| NodeError::Disk { endpoint: Arc::clone(endpoint), source: Box::new(error) })?;
        let source = ReplicaSource { peer: shared.peers.get(&staged.endpoint), address: staged.address };
        located.sources.push(source);
        // Counted from the request, because the node's clock started before the response arrived.
        let expires_at = requested_at + Duration::from_millis(staged.ttl_ms);
        Ok(Some(StagedObjectGuard {
            node,
            batch: staged.batch_id,
            expires_at,
            supervisor: shared.supervisor.clone(),
        }))
    }
}
