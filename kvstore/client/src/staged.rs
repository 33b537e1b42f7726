//! Objects that are only on a node's disk: the node brings them into its memory for a while, and there they are read.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moongate_kvstore::rpc::{self, Authentication, DiskNode};
use moongate_runtime::Supervisor;
use parking_lot::Mutex;

use crate::client::Client;
use crate::error::NodeError;
use crate::locate::{Located, Source};

/// Nodes that are remembered at most. When there are more, all are forgotten.
const MOST_NODES: usize = 1024;

/// The nodes with disks that this client has met.
#[derive(Default)]
pub(crate) struct Disks(Mutex<HashMap<Arc<str>, DiskNode>>);

impl Disks {
    fn get(
        &self,
        endpoint: &Arc<str>,
        options: rpc::Options,
        authentication: Option<&Authentication>,
        supervisor: &Supervisor,
    ) -> DiskNode {
        let mut nodes = self.0.lock();
        if nodes.len() >= MOST_NODES && !nodes.contains_key(endpoint) {
            nodes.clear();
        }
        let new = || DiskNode::authenticated(endpoint, options, authentication.cloned(), supervisor);
        nodes.entry(Arc::clone(endpoint)).or_insert_with(new).clone()
    }
}

/// An object in the memory of a node, given back when this is dropped.
pub(crate) struct Staged {
    node: DiskNode,
    batch: u64,
    until: Instant,
    supervisor: Supervisor,
}

impl Staged {
    /// Whether the object was there until now.
    pub(crate) fn holds(&self) -> bool {
        Instant::now() < self.until
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let (node, batch) = (self.node.clone(), self.batch);
        self.supervisor.spawn("kv-release", async move {
            if let Err(error) = node.release(batch).await {
                tracing::debug!(%error, "the node takes its memory back by itself");
            }
        });
    }
}

impl Client {
    /// Has an object brought into memory that is only on a disk, and makes that its source.
    pub(crate) async fn stage(&self, key: &str, located: &mut Located) -> Result<Option<Staged>, NodeError> {
        let Some(endpoint) = located.disk.as_ref().filter(|_| located.sources.is_empty()) else {
            return Ok(None);
        };
        let (shared, asked) = (&*self.shared, Instant::now());
        let failed = |reason: String| NodeError::Disk { endpoint: Arc::clone(endpoint), reason };
        let options = rpc::Options { connections: 1, ..shared.options.master };
        let node =
            shared.disks.get(endpoint, options, shared.options.authentication.as_ref(), &shared.supervisor);
        let staged = node.stage(&shared.options.tenant, key, located.size as u64).await;
        let staged = staged.map_err(|error| failed(error.to_string()))?;
        let address = staged.addresses.first().copied();
        let address = address.ok_or_else(|| failed("it brought nothing".to_owned()))?;
        let source = Source { peer: shared.peers.get(&staged.endpoint), address };
        located.sources.push(source);
        let until = asked + Duration::from_millis(staged.ttl_ms);
        Ok(Some(Staged { node, batch: staged.batch_id, until, supervisor: shared.supervisor.clone() }))
    }
}
