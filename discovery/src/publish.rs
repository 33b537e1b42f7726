//! The published snapshot: one writer, any number of readers that never block.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, watch};

use crate::location::HostLocations;
use crate::topology::{EngineInstance, InstanceId, Topology};

/// Capacity of the queue of probe requests. Further requests are dropped: the prober is already busy with the queued ones.
const MAX_PROBE_REQUESTS: usize = 256;

/// A publisher and its first reader, over an empty topology of generation 0.
///
/// [`crate::start`] uses it, and tests that publish their own instances.
#[must_use]
pub fn channel() -> (TopologyPublisher, TopologyReader) {
    let current = Arc::new(ArcSwap::from_pointee(Topology::default()));
    let (generation, generations) = watch::channel(0);
    let (request, requests) = mpsc::channel(MAX_PROBE_REQUESTS);
    (
        TopologyPublisher { current: current.clone(), generation, requests },
        TopologyReader { current, generations, request },
    )
}

/// The only writer of the topology.
#[derive(Debug)]
pub struct TopologyPublisher {
    current: Arc<ArcSwap<Topology>>,
    generation: watch::Sender<u64>,
    requests: mpsc::Receiver<InstanceId>,
}

impl TopologyPublisher {
    /// Publishes the next generation unless the content is unchanged. Of instances with the same id the first is kept.
    /// Returns whether it published.
    pub fn publish(&mut self, mut instances: Vec<Arc<EngineInstance>>, hosts: HostLocations) -> bool {
        instances.sort_by(|a, b| a.id.cmp(&b.id));
        instances.dedup_by(|later, earlier| later.id == earlier.id);
        let previous = self.current.load_full();
        // Unchanged instances keep their allocation, so that readers can compare pointers.
        for instance in &mut instances {
            if let Some(same) = previous.get(&instance.id).filter(|old| *old == instance) {
                *instance = same.clone();
            }
        }
        if previous.instances == instances && *previous.hosts == hosts {
            return false;
        }
        let generation = previous.generation + 1;
        self.current.store(Arc::new(Topology { generation, instances, hosts: Arc::new(hosts) }));
        self.generation.send_replace(generation);
        true
    }

    /// The next instance for which a reader requests a probe; `None` when all readers are gone.
    pub async fn next_probe_request(&mut self) -> Option<InstanceId> {
        self.requests.recv().await
    }
}

/// A reader of the topology. Clones are cheap and independent.
#[derive(Debug, Clone)]
pub struct TopologyReader {
    current: Arc<ArcSwap<Topology>>,
    generations: watch::Receiver<u64>,
    request: mpsc::Sender<InstanceId>,
}

impl TopologyReader {
    /// The newest snapshot; never blocks.
    #[must_use]
    pub fn current(&self) -> Arc<Topology> {
        self.current.load_full()
    }

    /// Waits for a snapshot newer than the last one returned here. `None` when discovery has stopped.
    pub async fn changed(&mut self) -> Option<Arc<Topology>> {
        self.generations.changed().await.ok()?;
        Some(self.current())
    }

    /// Waits until the newest snapshot satisfies `condition`, and returns it. `None` when discovery stops before.
    pub async fn wait_for(&mut self, mut condition: impl FnMut(&Topology) -> bool) -> Option<Arc<Topology>> {
        loop {
            self.generations.mark_unchanged();
            let topology = self.current();
            if condition(&topology) {
                return Some(topology);
            }
            self.generations.changed().await.ok()?;
        }
    }

    /// Requests a probe without waiting for it: for instance after a vLLM decode returned 500, since a restarted
    /// prefill has a new engine id. Requests for one instance within 100 ms count as one; unknown ids are ignored.
    pub fn request_probe(&self, id: &InstanceId) {
        if self.request.try_send(id.clone()).is_err() {
            tracing::debug!(%id, "probe request dropped: the queue is full, or discovery has stopped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::location::PhysicalLocation;
    use crate::topology::{DeclaredFacts, EngineRole, InstanceReadiness, InstanceSource, KubernetesWorkload};

    fn instance(id: &str, url: &str) -> Arc<EngineInstance> {
        Arc::new(EngineInstance {
            id: id.into(),
            role: EngineRole::Plain,
            url: url.into(),
            source: InstanceSource::Static,
            location: PhysicalLocation::default(),
            workload: KubernetesWorkload::default(),
            declared: DeclaredFacts::default(),
            readiness: InstanceReadiness::Ready,
            facts: None,
        })
    }

    #[tokio::test]
    async fn only_changes_are_published_and_the_rest_is_shared() {
        let (mut publisher, mut reader) = channel();
        assert!(publisher.publish(vec![instance("b", "1"), instance("a", "1")], HostLocations::default()));
        let first = reader.changed().await.unwrap();
        assert_eq!(first.generation, 1);
        assert!(first.get(&"b".into()).is_some() && first.get(&"c".into()).is_none());
        let same = vec![instance("a", "1"), instance("b", "1")];
        assert!(!publisher.publish(same, HostLocations::default()), "same content");
        assert!(publisher.publish(vec![instance("a", "2"), instance("b", "1")], HostLocations::default()));
        let second = reader.changed().await.unwrap();
        assert_eq!(second.generation, 2);
        assert!(Arc::ptr_eq(&first.instances[1], &second.instances[1]));
        let location = PhysicalLocation { node: Some("n".into()), ..PhysicalLocation::default() };
        let hosts = HostLocations::from_iter([("store".to_owned(), location)]);
        assert!(publisher.publish(second.instances.clone(), hosts), "a host has another location");
        assert!(reader.changed().await.is_some());
        drop(publisher);
        assert!(reader.changed().await.is_none());
    }

    #[tokio::test]
    async fn probe_requests_reach_the_writer_and_never_block() {
        let (mut publisher, reader) = channel();
        for _ in 0..MAX_PROBE_REQUESTS * 2 {
            reader.request_probe(&"a".into());
        }
        assert_eq!(publisher.next_probe_request().await, Some("a".into()));
    }
}
