//! Where lists and probes meet: the one task that decides what the snapshot says.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::listing::{SourceLists, SourceUpdate};
use crate::options::ProbeOptions;
use crate::probe::EngineProber;
use crate::probe::report::ProbeVerdict;
use crate::probed_instance::ProbedInstance;
use crate::publish::TopologyPublisher;
use crate::topology::{EngineInstance, EngineRole, InstanceId, KvTransferMethod};

type ProbeFuture = BoxFuture<'static, (InstanceId, u64, ProbeVerdict)>;

pub(crate) struct DiscoveryHub {
    prober: Arc<EngineProber>,
    options: ProbeOptions,
    publisher: TopologyPublisher,
    lists: SourceLists,
    entries: BTreeMap<InstanceId, ProbedInstance>,
    running: FuturesUnordered<ProbeFuture>,
    /// Probes started so far.
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

    /// Takes a source's list and publishes what follows from it.
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

    /// Runs until `stop`. Probes live inside this future, so stopping it stops them.
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

    /// Starts what is due, oldest first and as many as may run; answers when the next one is due.
    fn start_due(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let free = self.options.concurrency.max(1).saturating_sub(self.running.len());
        let mut next = None;
        let mut due = Vec::new();
        for (id, entry) in &self.entries {
            match entry.due() {
                Some(at) if at <= now => due.push((at, id.clone())),
                Some(at) => next = Some(next.map_or(at, |next: Instant| next.min(at))),
                None => {}
            }
        }
        due.sort();
        // What finds no free place waits for a probe to end, which wakes the loop.
        for (_, id) in due.into_iter().take(free) {
            if let Some(entry) = self.entries.get_mut(&id) {
                self.next_probe_id += 1;
                let ticket = self.next_probe_id;
                let listed = entry.start(ticket, now);
                let prober = self.prober.clone();
                self.running.push(Box::pin(async move { (id, ticket, prober.probe(&listed).await.verdict) }));
            }
        }
        next
    }

    fn finish(&mut self, done: (InstanceId, u64, ProbeVerdict)) {
        let mut changed = self.apply_result(done);
        // Probes that ended together are published together.
        while let Some(Some(done)) = self.running.next().now_or_never() {
            changed |= self.apply_result(done);
        }
        if changed {
            self.publish();
        }
    }

    fn apply_result(&mut self, (id, ticket, verdict): (InstanceId, u64, ProbeVerdict)) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        let changed = entry.finish(ticket, verdict, Instant::now(), fastrand::f64(), &self.options);
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
        .filter_map(|facts| match facts.transfer.as_ref()? {
            KvTransferMethod::SglangBootstrap { .. } => None,
            KvTransferMethod::VllmNixl => Some(KvTransferMethod::VllmNixl),
            KvTransferMethod::VllmMooncake { .. } => {
                Some(KvTransferMethod::VllmMooncake { bootstrap: None, engine_ids: BTreeMap::new() })
            }
            KvTransferMethod::VllmStore => Some(KvTransferMethod::VllmStore),
        });
    let first = transfers.next()?;
    transfers.all(|other| other == first).then_some(first)
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;
