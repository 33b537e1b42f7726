//! The store's nodes: locations of replicas, and blocks lost with a node or with the master.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::object_locations::ObjectLocation;
use moongate_master_client::admin::AdminError;
use moongate_master_client::nodes::{NodeWatcher, StoreNodeEvent};
use moongate_scheduler::StoreMedium;
use moongate_scheduler::index::{KvBlockIndex, StoreNodeSlot};
use moongate_store_shards::ShardIndex;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::StoreView;
use crate::fleet::host;

/// How long the master may be unreachable before its blocks are cleared: engines read nothing from a store without a master. Longer
/// than a master takes to restart or to fail over.
const MASTER_SILENCE_LIMIT: Duration = Duration::from_secs(5);
/// The limit for a master that can be reached but does not respond. While it lists all keys for a gateway, it answers no other
/// query: more than a second per million keys.
const BUSY_MASTER_SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// Store nodes by the endpoint in replica descriptors.
#[derive(Debug)]
pub(super) struct StoreNodeTable {
    by_endpoint: HashMap<String, StoreNodeSlot>,
    /// Hosts of nodes, including lost ones until their slots are reused.
    hosts: HashMap<StoreNodeSlot, Arc<str>>,
    /// What each master reports.
    reports: Vec<NodeReport>,
    /// Dead nodes that a master still lists, with blocks marked as readable.
    lost: HashSet<String>,
    live: BTreeSet<String>,
    /// Number of times that all blocks were cleared.
    clears: u64,
}

/// The nodes of one master. All masters of a store have the same nodes, but notice a loss at different times.
#[derive(Clone, Debug, Default)]
struct NodeReport {
    lost: HashSet<String>,
    live: Vec<String>,
}

impl StoreNodeTable {
    /// A table without nodes, for this number of masters.
    pub(super) fn new(masters: usize) -> Self {
        Self {
            by_endpoint: HashMap::new(),
            hosts: HashMap::new(),
            reports: vec![NodeReport::default(); masters],
            lost: HashSet::new(),
            live: BTreeSet::new(),
            clears: 0,
        }
    }

    /// Copies the state of a master's node watcher.
    fn update(&mut self, master: ShardIndex, watch: &NodeWatcher) {
        if let Some(report) = self.reports.get_mut(master) {
            let live = watch.live_nodes().map(|node| node.endpoint.clone()).collect();
            *report = NodeReport { lost: lost(watch), live };
        }
        self.lost = self.reports.iter().flat_map(|report| &report.lost).cloned().collect();
        let live = self.reports.iter().flat_map(|report| &report.live);
        self.live = live.filter(|endpoint| !self.lost.contains(*endpoint)).cloned().collect();
    }

    fn live_count(&self) -> usize {
        self.live.len()
    }

    /// Endpoints of the nodes, with whether they are alive; live ones first.
    pub(super) fn status(&self) -> Vec<(String, bool)> {
        let live_nodes = self.live.iter().map(|endpoint| (endpoint.clone(), true));
        let mut all: Vec<_> =
            live_nodes.chain(self.lost.iter().map(|endpoint| (endpoint.clone(), false))).collect();
        all.sort_by(|(endpoint, is_live), (other_endpoint, other_is_live)| {
            (other_is_live, endpoint).cmp(&(is_live, other_endpoint))
        });
        all
    }

    /// The slot of the node at an endpoint; `None` if it is lost, or if there are too many nodes.
    pub(super) fn node_at(&mut self, endpoint: &str, blocks: &mut KvBlockIndex) -> Option<StoreNodeSlot> {
        if self.lost.contains(endpoint) {
            return None;
        }
        if let Some(node) = self.by_endpoint.get(endpoint) {
            return Some(*node);
        }
        let node = blocks.add_store_node()?;
        self.by_endpoint.insert(endpoint.to_owned(), node);
        self.hosts.insert(node, host(endpoint).into());
        Some(node)
    }

    pub(super) fn host(&self, node: StoreNodeSlot) -> Option<&Arc<str>> {
        self.hosts.get(&node)
    }

    /// Number of times that all blocks were cleared. Locations that were requested before a clear are out of date after it.
    pub(super) fn clears(&self) -> u64 {
        self.clears
    }

    /// The first location of a list, memory before disks, whose node is alive.
    pub(super) fn listed_location<'b>(
        &self,
        mut locations: impl Iterator<Item = ObjectLocation<'b>>,
    ) -> Option<(&'b str, StoreMedium)> {
        let location = locations.find(|location| !self.lost.contains(location.endpoint))?;
        let medium = if location.is_on_disk { StoreMedium::Nvme } else { StoreMedium::Dram };
        Some((location.endpoint, medium))
    }

    /// Where an object can be read: in memory if a live node has a replica there, else on disk.
    pub(super) fn location(&self, replicas: &KeyReplicas<'_>) -> Option<(String, StoreMedium)> {
        let is_live = |endpoint: &str| !self.lost.contains(endpoint);
        let mut buffers = replicas.values.iter().flatten();
        if let Some(buffer) = buffers.find(|buffer| is_live(&buffer.endpoint)) {
            return Some((buffer.endpoint.clone().into_owned(), StoreMedium::Dram));
        }
        let mut disks = replicas.local_disk_values.iter().flatten();
        let disk = disks.find(|disk| is_live(&disk.transport_endpoint))?;
        Some((disk.transport_endpoint.clone(), StoreMedium::Nvme))
    }
}

/// Endpoints at which only dead nodes are listed.
fn lost(watch: &NodeWatcher) -> HashSet<String> {
    let mut lost: HashSet<String> = watch.lost_nodes().map(|node| node.endpoint.clone()).collect();
    // A node that has restarted at the same address is listed twice for a while.
    watch.live_nodes().for_each(|node| {
        lost.remove(&node.endpoint);
    });
    lost
}

impl StoreView {
    /// Follows the nodes of a master until `stop`.
    pub(crate) async fn watch_nodes(self: Arc<Self>, master: ShardIndex, stop: CancellationToken) {
        let Some(admin) = self.admins.get(master) else { return };
        let mut watch = NodeWatcher::new(admin.clone(), Default::default());
        let mut clear_at: Option<Instant> = None;
        // Whether the last loss of the master was a timeout.
        let mut busy = false;
        loop {
            let event = tokio::select! {
                () = stop.cancelled() => return,
                event = watch.next() => event,
                () = sleep_until(clear_at.unwrap_or_else(Instant::now)), if clear_at.is_some() => {
                    clear_at = None;
                    tracing::warn!("the store's master is unreachable: blocks in the store are ignored until it responds");
                    self.clear();
                    if self.admins.count() > 1 {
                        // The others still serve their objects.
                        self.scan_requested.notify_one();
                    }
                    continue;
                }
            };
            self.nodes.lock().update(master, &watch);
            match &event {
                StoreNodeEvent::MasterLost(error) => {
                    busy = matches!(error, AdminError::TimedOut { .. });
                    clear_at = Some(
                        Instant::now() + if busy { BUSY_MASTER_SILENCE_LIMIT } else { MASTER_SILENCE_LIMIT },
                    );
                }
                StoreNodeEvent::MasterRecovered => {
                    let cleared = clear_at.take().is_none();
                    if busy && !cleared {
                        tracing::debug!("the store's master responds again");
                        continue;
                    }
                }
                StoreNodeEvent::Up(_) | StoreNodeEvent::Lost(..) => {}
            }
            self.apply_node_event(event);
            self.metrics.nodes.set(i64::try_from(self.nodes.lock().live_count()).unwrap_or(i64::MAX));
        }
    }

    fn apply_node_event(&self, event: StoreNodeEvent) {
        match event {
            StoreNodeEvent::Up(node) => {
                tracing::info!(node = node.endpoint, "store node is up");
            }
            StoreNodeEvent::Lost(node, reason) => {
                tracing::warn!(node = node.endpoint, %reason, "store node lost; its blocks are removed");
                self.remove_node(&node.endpoint);
            }
            StoreNodeEvent::MasterLost(error) => {
                tracing::warn!(%error, "the store's master does not respond; its blocks are removed if this continues");
                return;
            }
            StoreNodeEvent::MasterRecovered => {
                tracing::info!("the store's master responds");
                // It may be another process without keys.
                self.confirmed.invalidate_all();
            }
        }
        self.scan_requested.notify_one();
    }

    /// Clears all blocks, until they are found again.
    pub(super) fn clear(&self) {
        let mut nodes = self.nodes.lock();
        nodes.clears += 1;
        let known = std::mem::take(&mut nodes.by_endpoint);
        self.index.update(|blocks| known.into_values().for_each(|node| blocks.remove_store_node(node)));
        self.confirmed.invalidate_all();
    }

    fn remove_node(&self, endpoint: &str) {
        let mut nodes = self.nodes.lock();
        if let Some(node) = nodes.by_endpoint.remove(endpoint) {
            self.index.update(|blocks| blocks.remove_store_node(node));
        }
        self.confirmed.invalidate_all();
    }
}

#[cfg(test)]
mod tests {
    use mooncake_wire::key::ObjectKey;
    use moongate_discovery::{EngineStoreFacts, StoreKeyScheme};
    use moongate_master_client::admin::AdminClient;
    use moongate_scheduler::index::{BlockHashNamespace, IndexLookup};
    use tokio::time::sleep;

    use super::super::StoreAdmins;
    use super::*;
    use crate::feedback::GatewayMetrics;
    use crate::kv_index::StoreKeyNaming;
    use crate::kv_index::{EngineSlotGuard, KvIndex};

    const KEY: &str = "tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111";

    fn layout() -> StoreKeyNaming {
        let store = EngineStoreFacts {
            keys: StoreKeyScheme::Vllm { prefix: String::new(), model: Some("tiny".into()) },
            tp_size: Some(1),
            pp_size: None,
            prefetch_threshold: None,
            prefetch_policy: None,
            master: None,
        };
        StoreKeyNaming::from_store(&store, BlockHashNamespace::new(&["vllm", "tiny"])).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn blocks_are_cleared_when_the_master_stays_silent() {
        // No server listens at this address.
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let admin = AdminClient::new(&address.to_string(), Default::default()).unwrap();
        let index = KvIndex::new(100);
        let engine = EngineSlotGuard::new(index.clone());
        let admins = StoreAdmins::new(vec![admin]).unwrap();
        let view = StoreView::new(admins, index.clone(), GatewayMetrics::new(None).store);
        let stored = layout().parse_key(&ObjectKey::parse(KEY).unwrap()).unwrap();
        let key = stored.block;
        let location = ("127.0.0.1:1".to_owned(), StoreMedium::Dram);
        assert!(view.record_block(&layout(), key, [Some(location.clone()), Some(location)]));
        let shared = |index: &KvIndex| {
            let mut hits = IndexLookup::default();
            index.lookup(&[key], &mut hits);
            hits.engine(engine.slot()).shared
        };
        assert_eq!(shared(&index), 1);
        let stop = CancellationToken::new();
        let start = Instant::now();
        let wait = async {
            while shared(&index) > 0 {
                sleep(Duration::from_millis(100)).await;
            }
            stop.cancel();
        };
        tokio::join!(view.watch_nodes(0, stop.clone()), wait);
        assert!(start.elapsed() >= MASTER_SILENCE_LIMIT, "a short outage is tolerated");
    }
}
