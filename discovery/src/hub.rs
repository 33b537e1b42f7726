//! Where lists and probes meet: the one task that decides what the snapshot says.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::entry::Entry;
use crate::listing::{Lists, Update};
use crate::options::ProbeOptions;
use crate::probe::Prober;
use crate::probe::report::Verdict;
use crate::reader::TopologyPublisher;
use crate::topology::{Instance, InstanceId, KvTransfer, Role};

type Probe = BoxFuture<'static, (InstanceId, u64, Verdict)>;

pub(crate) struct Hub {
    prober: Arc<Prober>,
    options: ProbeOptions,
    publisher: TopologyPublisher,
    lists: Lists,
    entries: BTreeMap<InstanceId, Entry>,
    running: FuturesUnordered<Probe>,
    /// Probes started so far.
    tickets: u64,
}

impl Hub {
    pub(crate) fn new(prober: Prober, options: ProbeOptions, publisher: TopologyPublisher) -> Self {
        Self {
            prober: Arc::new(prober),
            options,
            publisher,
            lists: Lists::default(),
            entries: BTreeMap::new(),
            running: FuturesUnordered::new(),
            tickets: 0,
        }
    }

    /// Takes a source's list and publishes what follows from it.
    pub(crate) fn list(&mut self, update: Update) {
        self.lists.replace(update);
        let now = Instant::now();
        let mut before = std::mem::take(&mut self.entries);
        for (id, listed) in self.lists.merged() {
            let entry = match before.remove(&id) {
                Some(mut entry) => {
                    entry.relist(listed, now);
                    entry
                }
                None => Entry::new(listed, now),
            };
            self.entries.insert(id, entry);
        }
        self.publish();
    }

    /// Runs until `stop`. Probes live inside this future, so stopping it stops them.
    pub(crate) async fn run(mut self, mut updates: mpsc::Receiver<Update>, stop: CancellationToken) {
        let mut sources_open = true;
        let mut readers_open = true;
        loop {
            let next_due = self.start_due();
            tokio::select! {
                () = stop.cancelled() => return,
                update = updates.recv(), if sources_open => match update {
                    Some(update) => self.list(update),
                    None => sources_open = false,
                },
                request = self.publisher.requested(), if readers_open => match request {
                    Some(id) => self.ask(&id),
                    None => readers_open = false,
                },
                Some(done) = self.running.next() => self.finish(done),
                () = sleep_until(next_due) => {}
            }
        }
    }

    fn ask(&mut self, id: &InstanceId) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.ask(Instant::now());
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
                self.tickets += 1;
                let ticket = self.tickets;
                let listed = entry.start(ticket, now);
                let prober = self.prober.clone();
                self.running.push(Box::pin(async move { (id, ticket, prober.probe(&listed).await.verdict) }));
            }
        }
        next
    }

    fn finish(&mut self, done: (InstanceId, u64, Verdict)) {
        let mut changed = self.settle(done);
        // Probes that ended together are published together.
        while let Some(Some(done)) = self.running.next().now_or_never() {
            changed |= self.settle(done);
        }
        if changed {
            self.publish();
        }
    }

    fn settle(&mut self, (id, ticket, verdict): (InstanceId, u64, Verdict)) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        let changed = entry.finish(ticket, verdict, Instant::now(), fastrand::f64(), &self.options);
        if changed {
            tracing::info!(%id, readiness = ?entry.instance(None).readiness, "instance probed");
        }
        changed
    }

    fn publish(&mut self) {
        let decided: Vec<Arc<Instance>> = self
            .entries
            .values()
            .filter(|entry| !entry.lacks_connector())
            .map(|entry| entry.instance(None))
            .collect();
        let undecided: Vec<Arc<Instance>> = self
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
fn prefills_transfer(instances: &[Arc<Instance>], decode: &Instance) -> Option<KvTransfer> {
    let models = &decode.facts.as_ref().filter(|_| decode.role == Role::Decode)?.models;
    let mut transfers = instances
        .iter()
        .filter(|instance| instance.role == Role::Prefill)
        .filter_map(|instance| instance.usable())
        .filter(|facts| facts.models.iter().any(|model| models.contains(model)))
        .filter_map(|facts| match facts.transfer.as_ref()? {
            KvTransfer::SglangBootstrap { .. } => None,
            KvTransfer::VllmNixl => Some(KvTransfer::VllmNixl),
            KvTransfer::VllmMooncake { .. } => {
                Some(KvTransfer::VllmMooncake { bootstrap: None, engine_ids: BTreeMap::new() })
            }
            KvTransfer::VllmStore => Some(KvTransfer::VllmStore),
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
