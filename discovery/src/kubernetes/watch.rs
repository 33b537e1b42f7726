//! Updates the listing from the API server: list, watch, and a complete list again after an interval.
//!
//! A watch can end without an error, or deliver no events while its connection stays open; gateways have routed to deleted pods
//! for hours because of this. So every `relist` interval the watch is dropped and restarted with a list. The old list is used
//! until the new one is complete, also while the API server does not respond.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{KubernetesDiscoveryOptions, pod};
use crate::listing::{ListedHost, ListedInstance, SourceUpdate};
use crate::topology::MAX_INSTANCES;

/// Time limit for a complete list, after which it is restarted.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Watches the pods of one selector.
pub(crate) struct PodWatcher {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    pub(crate) selector: String,
    pub(crate) options: KubernetesDiscoveryOptions,
    pub(crate) slot: usize,
    pub(crate) out: mpsc::Sender<SourceUpdate>,
}

/// Pods by UID, since a recreated pod has the same name and another UID.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct ObservedPods {
    engines: BTreeMap<String, ListedInstance>,
    others: BTreeMap<String, ListedHost>,
}

impl ObservedPods {
    fn remove(&mut self, uid: &str) {
        self.engines.remove(uid);
        self.others.remove(uid);
    }

    fn len(&self) -> usize {
        self.engines.len() + self.others.len()
    }

    fn update(&self, slot: usize) -> SourceUpdate {
        let (instances, hosts) = (self.engines.values().cloned(), self.others.values().cloned());
        SourceUpdate { slot, instances: instances.collect(), hosts: hosts.collect() }
    }
}

/// The pods according to the watch's events.
#[derive(Default)]
struct PodStore {
    current: ObservedPods,
    /// Pods received so far of a list in progress.
    incoming: ObservedPods,
    /// Whether the running watch has received a complete list.
    complete: bool,
}

impl PodWatcher {
    pub(crate) async fn run(self, stop: CancellationToken) {
        tracing::info!(namespace = self.namespace, selector = self.selector, "watching engine pods");
        let mut store = PodStore::default();
        let mut sent: Option<SourceUpdate> = None;
        while !stop.is_cancelled() {
            tokio::select! {
                () = stop.cancelled() => return,
                hub_gone = self.watch(&mut store, &mut sent) => if hub_gone { return },
            }
        }
    }

    /// Runs one list and its watch until the next list is due. Returns whether the hub has stopped receiving.
    async fn watch(&self, store: &mut PodStore, sent: &mut Option<SourceUpdate>) -> bool {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let config = watcher::Config::default().labels(&self.selector);
        let mut events = pin!(watcher(api, config).default_backoff());
        store.complete = false;
        let mut deadline = Instant::now() + LIST_TIMEOUT.max(self.options.relist);
        loop {
            let event = tokio::select! {
                () = tokio::time::sleep_until(deadline) => {
                    if !store.complete {
                        tracing::warn!(selector = self.selector, "pod list timed out; restarting the watch");
                    }
                    return false;
                }
                event = events.try_next() => event,
            };
            match event {
                Ok(Some(event)) => {
                    if store.apply_event(event, &self.options) {
                        deadline = Instant::now() + self.options.relist;
                    }
                }
                Ok(None) => return false,
                Err(error) => {
                    tracing::warn!(
                        namespace = self.namespace,
                        selector = self.selector,
                        %error,
                        "Kubernetes API request failed; keeping the last pod list; check the API server and that the service account may list and watch pods"
                    );
                    continue;
                }
            }
            let update = store.current.update(self.slot);
            if sent.as_ref() != Some(&update) {
                *sent = Some(update.clone());
                if self.out.send(update).await.is_err() {
                    return true;
                }
            }
        }
    }
}

impl PodStore {
    /// Applies an event; returns whether it completed a list.
    fn apply_event(&mut self, event: watcher::Event<Pod>, options: &KubernetesDiscoveryOptions) -> bool {
        match event {
            watcher::Event::Init => self.incoming = ObservedPods::default(),
            watcher::Event::InitApply(pod) => apply(&mut self.incoming, &pod, options),
            watcher::Event::InitDone => {
                self.current = std::mem::take(&mut self.incoming);
                self.complete = true;
                return true;
            }
            watcher::Event::Apply(pod) => apply(&mut self.current, &pod, options),
            watcher::Event::Delete(pod) => {
                if let Some(uid) = &pod.metadata.uid {
                    self.current.remove(uid);
                }
            }
        }
        false
    }
}

fn apply(pods: &mut ObservedPods, pod: &Pod, options: &KubernetesDiscoveryOptions) {
    let Some(uid) = &pod.metadata.uid else { return };
    pods.remove(uid);
    let (listed, host) = (pod::to_listed_instance(pod, options), pod::to_listed_host(pod));
    if pods.len() >= MAX_INSTANCES {
        tracing::error!(limit = MAX_INSTANCES, "too many pods; narrow the selector");
    } else if let Some(listed) = listed {
        pods.engines.insert(uid.clone(), listed);
    } else if let Some(host) = host {
        pods.others.insert(uid.clone(), host);
    }
}
