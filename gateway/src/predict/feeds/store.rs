//! What the shared store has: from its master's metadata, without leasing a single object.
//!
//! Masters from PyPI publish no events. So the whole of the keys is read now and then, slowly; what a request could use is asked for
//! when the request is there ([`StoreView::confirm`]); and nodes are watched, because the master goes on to list the pages of a dead
//! one for seconds.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use moka::sync::Cache;
use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::key::{ObjectKey, PageHash};
use moongate_kvstore::admin::{Admin, AdminError};
use moongate_kvstore::nodes::{NodeEvent, NodeWatch};
use moongate_kvstore::snapshot;
use moongate_pages::{Digest, Page};
use moongate_scheduler::Medium;
use moongate_scheduler::index::{PageIndex, Source, StoreNode};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::feedback::StoreMetrics;
use crate::fleet::FleetReader;
use crate::predict::index::KvIndex;
use crate::predict::stored::{Stored, StoredAs};

/// Pause between two readings of all keys. What requests use is asked for anyway; this finds what others stored.
const READ_EVERY: Duration = Duration::from_secs(10);
/// Pause after a reading that failed.
const READ_AGAIN: Duration = Duration::from_secs(1);
/// Pages asked for at first, and at most, at once: an answer about 64 takes the master 0.2 ms.
const FIRST_PROBE: usize = 64;
const LARGEST_PROBE: usize = 512;
/// How long a page that was seen in the store is taken for there. The store evicts what was not used for longest, and a lease that an
/// engine takes when it reads lasts 10 s; a page just seen is not the first to go.
const CONFIRMED_FOR: Duration = Duration::from_secs(2);
/// How many confirmed pages are remembered.
const CONFIRMED_PAGES: u64 = 1 << 20;
/// How long a request waits for the master: far less than what a wrong guess costs.
const PATIENCE: Duration = Duration::from_millis(20);
/// After a failure, requests do not ask for so long.
const SULK: Duration = Duration::from_secs(1);
/// How long the master may be silent before its pages are forgotten: engines read nothing from a store without a master. It is longer
/// than a master takes to start again, or to hand over.
const MASTER_GRACE: Duration = Duration::from_secs(5);

/// The store, as the gateway sees it.
#[derive(Debug)]
pub(crate) struct StoreView {
    admin: Admin,
    index: Arc<KvIndex>,
    metrics: Arc<StoreMetrics>,
    nodes: Mutex<Nodes>,
    /// Pages that were found complete a moment ago.
    confirmed: Cache<u64, ()>,
    /// Until when requests do not ask, because the master failed.
    sulking: Mutex<Option<Instant>>,
    read_now: Notify,
}

/// Store nodes by the endpoint that replicas name.
#[derive(Debug, Default)]
struct Nodes {
    known: HashMap<String, StoreNode>,
    /// Dead ones that the master still lists, and says of their pages that they can be read.
    lost: HashSet<String>,
}

impl Nodes {
    /// The node at an endpoint; `None` for one that is lost, or if there are too many.
    fn at(&mut self, endpoint: &str, pages: &mut PageIndex) -> Option<StoreNode> {
        if self.lost.contains(endpoint) {
            return None;
        }
        if let Some(node) = self.known.get(endpoint) {
            return Some(*node);
        }
        let node = pages.add_store_node()?;
        self.known.insert(endpoint.to_owned(), node);
        Some(node)
    }

    /// Where an object can be read: in memory if a node that lives has a replica there.
    fn place(&self, replicas: &KeyReplicas<'_>) -> Option<(String, Medium)> {
        let lives = |endpoint: &str| !self.lost.contains(endpoint);
        let mut buffers = replicas.values.iter().flatten();
        if let Some(buffer) = buffers.find(|buffer| lives(&buffer.endpoint)) {
            return Some((buffer.endpoint.clone().into_owned(), Medium::Dram));
        }
        let mut disks = replicas.local_disk_values.iter().flatten();
        let disk = disks.find(|disk| lives(&disk.transport_endpoint))?;
        Some((disk.transport_endpoint.clone(), Medium::Nvme))
    }
}

/// Endpoints at which only dead nodes are listed.
fn lost(watch: &NodeWatch) -> HashSet<String> {
    let mut lost: HashSet<String> = watch.lost().map(|node| node.endpoint.clone()).collect();
    // One that has restarted at the same address is listed twice for a while.
    watch.up().for_each(|node| {
        lost.remove(&node.endpoint);
    });
    lost
}

impl StoreView {
    pub(crate) fn new(admin: Admin, index: Arc<KvIndex>, metrics: Arc<StoreMetrics>) -> Arc<Self> {
        let confirmed = Cache::builder().max_capacity(CONFIRMED_PAGES).time_to_live(CONFIRMED_FOR).build();
        Arc::new(Self {
            admin,
            index,
            metrics,
            nodes: Mutex::default(),
            confirmed,
            sulking: Mutex::default(),
            read_now: Notify::new(),
        })
    }

    /// Follows the store's nodes until `stop`.
    pub(crate) async fn watch_nodes(self: Arc<Self>, stop: CancellationToken) {
        let mut watch = NodeWatch::new(self.admin.clone(), Default::default());
        let mut forget_at: Option<Instant> = None;
        loop {
            let event = tokio::select! {
                () = stop.cancelled() => return,
                event = watch.next() => event,
                () = sleep_until(forget_at.unwrap_or_else(Instant::now)), if forget_at.is_some() => {
                    forget_at = None;
                    self.forget();
                    continue;
                }
            };
            self.nodes.lock().lost = lost(&watch);
            match &event {
                NodeEvent::MasterLost(_) => forget_at = Some(Instant::now() + MASTER_GRACE),
                NodeEvent::MasterBack => forget_at = None,
                NodeEvent::Up(_) | NodeEvent::Lost(..) => {}
            }
            self.node_told(event);
            self.metrics.nodes.set(i64::try_from(watch.up().count()).unwrap_or(i64::MAX));
        }
    }

    fn node_told(&self, event: NodeEvent) {
        match event {
            NodeEvent::Up(node) => {
                tracing::info!(node = node.endpoint, "store node is there");
            }
            NodeEvent::Lost(node, why) => {
                tracing::warn!(node = node.endpoint, %why, "store node is lost, its pages do not count any more");
                self.lose(&node.endpoint);
            }
            NodeEvent::MasterLost(error) => {
                tracing::warn!(%error, "the store's master does not answer; its pages are forgotten soon");
                return;
            }
            NodeEvent::MasterBack => {
                tracing::info!("the store's master answers");
                // It may be another process, which has no keys.
                self.confirmed.invalidate_all();
            }
        }
        self.read_now.notify_one();
    }

    /// Forgets all pages, until they are found again.
    fn forget(&self) {
        tracing::warn!("the store's master stays silent: no page in the store counts until it answers");
        let known = std::mem::take(&mut self.nodes.lock().known);
        self.index.change(|pages| known.into_values().for_each(|node| pages.store_node_lost(node)));
        self.confirmed.invalidate_all();
    }

    fn lose(&self, endpoint: &str) {
        let mut nodes = self.nodes.lock();
        if let Some(node) = nodes.known.remove(endpoint) {
            self.index.change(|pages| pages.store_node_lost(node));
        }
        self.confirmed.invalidate_all();
    }

    /// Reads all keys again and again until `stop`.
    pub(crate) async fn keep_read(self: Arc<Self>, fleet: FleetReader, stop: CancellationToken) {
        loop {
            let layouts = fleet.current().stored_as();
            let pause = if layouts.is_empty() {
                READ_AGAIN
            } else {
                match stop.run_until_cancelled(self.read(&layouts)).await {
                    None => return,
                    Some(Ok(())) => READ_EVERY,
                    Some(Err(error)) => {
                        tracing::debug!(%error, "the store's keys cannot be read");
                        READ_AGAIN
                    }
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(pause) => {}
                () = self.read_now.notified() => {}
            }
        }
    }

    async fn read(&self, layouts: &[StoredAs]) -> Result<(), AdminError> {
        self.index.change(|pages| pages.begin_epoch(Source::Store));
        let of_layout = |key: &ObjectKey<'_>| layouts.iter().find_map(|layout| layout.read(key));
        let wanted = |key: &ObjectKey<'_>| of_layout(key).is_some();
        let found = |key: &ObjectKey<'_>, replicas: &KeyReplicas<'_>| {
            if let Some(stored) = of_layout(key) {
                self.put(&[stored], replicas);
            }
        };
        let summary = snapshot::read(&self.admin, &snapshot::Options::default(), wanted, found).await?;
        self.index.change(|pages| pages.end_epoch(Source::Store));
        self.metrics.readings.inc();
        self.metrics.objects.set(i64::try_from(summary.located).unwrap_or(i64::MAX));
        tracing::debug!(?summary, "the store's keys were read");
        Ok(())
    }

    /// Asks the master for pages of a prompt, in order, until one is not there. `pages` are the prompt's, `keys` the same in the index.
    pub(crate) async fn confirm(&self, layout: &StoredAs, pages: &[Page], keys: &[u64]) {
        if self.sulking.lock().is_some_and(|until| Instant::now() < until) {
            return;
        }
        match timeout(PATIENCE, self.ask(layout, pages, keys)).await {
            Ok(Ok(())) => {
                self.metrics.confirmed.inc();
            }
            failure => {
                self.metrics.unconfirmed.inc();
                if let Ok(Err(error)) = failure {
                    tracing::debug!(%error, "the store's master could not be asked for a prompt's pages");
                }
                *self.sulking.lock() = Some(Instant::now() + SULK);
            }
        }
    }

    async fn ask(&self, layout: &StoredAs, pages: &[Page], keys: &[u64]) -> Result<(), AdminError> {
        let confirmed = keys.iter().take_while(|key| self.confirmed.contains_key(*key)).count();
        // A full index may have displaced some of them since.
        let known = self.index.shared_prefix(&keys[..confirmed]);
        let (mut at, mut size) = (known, FIRST_PROBE);
        while at < pages.len() {
            let end = pages.len().min(at + size);
            if !self.ask_chunk(layout, &pages[at..end], &keys[at..end]).await? {
                return Ok(());
            }
            (at, size) = (end, LARGEST_PROBE.min(size * 2));
        }
        Ok(())
    }

    /// Returns whether all of these pages are there.
    async fn ask_chunk(&self, layout: &StoredAs, pages: &[Page], keys: &[u64]) -> Result<bool, AdminError> {
        let probes: Vec<[String; 2]> =
            pages.iter().filter_map(|page| Some(layout.probes(hash(page)?))).collect();
        let mut asked: Vec<&str> = probes.iter().flatten().map(String::as_str).collect();
        asked.dedup();
        let mut answers = HashMap::with_capacity(asked.len());
        let told = |key: &str, replicas: &KeyReplicas<'_>| {
            answers.insert(key.to_owned(), replicas.ok.then(|| self.nodes.lock().place(replicas)).flatten());
        };
        self.admin.locate(&asked, told).await?;
        let mut complete = true;
        for ([first, last], &key) in probes.iter().zip(keys) {
            let places = [first, last].map(|key| answers.get(key).cloned().flatten());
            complete &= self.page_is(layout, key, places);
        }
        Ok(complete)
    }

    /// Enters what was found of one page. Returns whether it is there.
    fn page_is(&self, layout: &StoredAs, key: u64, places: [Option<(String, Medium)>; 2]) -> bool {
        let mut nodes = self.nodes.lock();
        self.index.change(|pages| {
            let [first, last] =
                places.map(|place| place.and_then(|(at, medium)| Some((nodes.at(&at, pages)?, medium))));
            let (Some(first), Some(last)) = (first, last) else {
                layout.parts().for_each(|part| pages.part_removed(key, part));
                return false;
            };
            let count = layout.parts().count();
            for (number, part) in layout.parts().enumerate() {
                let (node, medium) = if number + 1 == count { last } else { first };
                pages.part_stored(key, part, node, medium);
            }
            self.confirmed.insert(key, ());
            true
        })
    }

    /// Enters objects that were found.
    fn put(&self, objects: &[Stored], replicas: &KeyReplicas<'_>) {
        let mut nodes = self.nodes.lock();
        let Some((endpoint, medium)) = nodes.place(replicas) else { return };
        self.index.change(|pages| {
            let Some(node) = nodes.at(&endpoint, pages) else { return };
            objects.iter().for_each(|stored| pages.part_stored(stored.page, stored.part, node, medium));
        });
    }
}

fn hash(page: &Page) -> Option<PageHash> {
    match &page.digest {
        Digest::Sha256(digest) => PageHash::new(digest),
        Digest::Unsigned(_) | Digest::Signed(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use moongate_discovery::{KvStore, StoreKeys};
    use moongate_scheduler::index::{Hits, Namespace};

    use super::*;
    use crate::predict::index::EngineEntry;

    const KEY: &str = "tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111";

    fn layout() -> StoredAs {
        let store = KvStore {
            keys: StoreKeys::Vllm { prefix: String::new(), model: Some("tiny".into()) },
            tp_size: Some(1),
            pp_size: None,
            prefetch_threshold: None,
            prefetch_policy: None,
            master: None,
        };
        StoredAs::of(&store, Namespace::new(&["vllm", "tiny"])).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn pages_of_a_store_whose_master_stays_silent_are_forgotten() {
        // Nobody listens there.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let admin = Admin::new(&free.to_string(), Default::default()).unwrap();
        let index = KvIndex::new(100);
        let engine = EngineEntry::new(index.clone());
        let view = StoreView::new(admin, index.clone(), Arc::default());
        let stored = layout().read(&ObjectKey::parse(KEY).unwrap()).unwrap();
        let key = stored.page;
        let at = ("127.0.0.1:1".to_owned(), Medium::Dram);
        assert!(view.page_is(&layout(), key, [Some(at.clone()), Some(at)]));
        let shared = |index: &KvIndex| {
            let mut hits = Hits::default();
            index.lookup(&[key], &mut hits);
            hits.of(engine.slot()).shared
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
        tokio::join!(view.watch_nodes(stop.clone()), wait);
        assert!(start.elapsed() >= MASTER_GRACE, "a short silence is forgiven");
    }
}
