//! The task that merges the lists of all sources with probe results and publishes the snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::kv_transfer::KvTransferMethod;
use crate::listing::{SourceLists, SourceUpdate};
use crate::probe::EngineProber;
use crate::probe::options::ProbeOptions;
use crate::probe::report::ProbeVerdict;
use crate::probed_instance::ProbedInstance;
use crate::publish::TopologyPublisher;
use crate::topology::{EngineInstance, EngineRole, InstanceId};

type ProbeFuture = BoxFuture<'static, (InstanceId, u64, ProbeVerdict)>;

pub(crate) struct DiscoveryHub {
    prober: Arc<EngineProber>,
    options: ProbeOptions,
    publisher: TopologyPublisher,
    lists: SourceLists,
    entries: BTreeMap<InstanceId, ProbedInstance>,
    running: FuturesUnordered<ProbeFuture>,
    /// Id of the last started probe, which is the number of probes so far.
    next_probe_id: u64,
}

impl DiscoveryHub {
    pub(crate) fn new(prober: EngineProber, options: ProbeOptions, publisher: TopologyPublisher) -> Self {
        Self {
            prober: Arc::new(prober),
            options,
            publisher,
            lists: SourceLists::default(),
            entries: BTreeMap::new(),
            running: FuturesUnordered::new(),
            next_probe_id: 0,
        }
    }

    /// Applies a source's list and publishes the resulting snapshot.
    pub(crate) fn apply_update(&mut self, update: SourceUpdate) {
        self.lists.replace(update);
        let now = Instant::now();
        let mut before = std::mem::take(&mut self.entries);
        for (id, listed) in self.lists.merged() {
            let entry = match before.remove(&id) {
                Some(mut entry) => {
                    entry.update_listing(listed, now);
                    entry
                }
                None => ProbedInstance::new(listed, now),
            };
            self.entries.insert(id, entry);
        }
        self.publish();
    }

    /// Runs until `stop`. Probes are part of this future, so they are cancelled with it.
    pub(crate) async fn run(mut self, mut updates: mpsc::Receiver<SourceUpdate>, stop: CancellationToken) {
        let mut sources_open = true;
        let mut readers_open = true;
        loop {
            let next_due = self.start_due();
            tokio::select! {
                () = stop.cancelled() => return,
                update = updates.recv(), if sources_open => match update {
                    Some(update) => self.apply_update(update),
                    None => sources_open = false,
                },
                request = self.publisher.next_probe_request(), if readers_open => match request {
                    Some(id) => self.request_probe(&id),
                    None => readers_open = false,
                },
                Some(done) = self.running.next() => self.finish(done),
                () = sleep_until(next_due) => {}
            }
        }
    }

    fn request_probe(&mut self, id: &InstanceId) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.request_probe(Instant::now());
        }
    }

    /// Starts due probes, oldest first, up to the concurrency limit. Returns the time of the next due probe.
    fn start_due(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let free = self.options.concurrency.max(1).saturating_sub(self.running.len());
        let mut next = None;
        let mut due = Vec::new();
        for (id, entry) in &self.entries {
            match entry.due() {
                Some(time) if time <= now => due.push((time, id.clone())),
                Some(time) => next = Some(next.map_or(time, |next: Instant| next.min(time))),
                None => {}
            }
        }
        due.sort();
        // Due probes beyond the limit start when a running probe ends, which wakes the loop.
        for (_, id) in due.into_iter().take(free) {
            if let Some(entry) = self.entries.get_mut(&id) {
                self.next_probe_id += 1;
                let probe_id = self.next_probe_id;
                let listed = entry.start(probe_id, now);
                let prober = self.prober.clone();
                self.running
                    .push(Box::pin(async move { (id, probe_id, prober.probe(&listed).await.verdict) }));
            }
        }
        next
    }

    fn finish(&mut self, done: (InstanceId, u64, ProbeVerdict)) {
        let mut changed = self.apply_result(done);
        // One publication for all probes that have ended by now.
        while let Some(Some(done)) = self.running.next().now_or_never() {
            changed |= self.apply_result(done);
        }
        if changed {
            self.publish();
        }
    }

    fn apply_result(&mut self, (id, probe_id, verdict): (InstanceId, u64, ProbeVerdict)) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        let changed = entry.finish(probe_id, verdict, Instant::now(), fastrand::f64(), &self.options);
        if changed {
            tracing::info!(%id, readiness = ?entry.instance(None).readiness, "instance probed");
        }
        changed
    }

    fn publish(&mut self) {
        let decided: Vec<Arc<EngineInstance>> = self
            .entries
            .values()
            .filter(|entry| !entry.lacks_connector())
            .map(|entry| entry.instance(None))
            .collect();
        let undecided: Vec<Arc<EngineInstance>> = self
            .entries
            .values()
            .filter(|entry| entry.lacks_connector())
            .map(|entry| entry.instance(prefills_transfer(&decided, &entry.instance(None))))
            .collect();
        let instances = decided.into_iter().chain(undecided).collect();
        self.publisher.publish(instances, self.lists.hosts());
    }
}

/// The transfer that all ready vLLM prefills of the decode's models use, if they agree on one.
fn prefills_transfer(instances: &[Arc<EngineInstance>], decode: &EngineInstance) -> Option<KvTransferMethod> {
    let models = &decode.facts.as_ref().filter(|_| decode.role == EngineRole::Decode)?.models;
    let mut transfers = instances
        .iter()
        .filter(|instance| instance.role == EngineRole::Prefill)
        .filter_map(|instance| instance.usable_facts())
        .filter(|facts| facts.models.iter().any(|model| models.contains(model)))
        .filter_map(|facts| facts.transfer.as_ref()?.of_decodes());
    let first = transfers.next()?;
    transfers.all(|other| other == first).then_some(first)
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;
