//! Keeps the listing in step with the API server: list, watch, and a complete list again after a while.
//!
//! A watch can end without an error, or go silent while its connection stays open; gateways have routed to deleted pods
//! for hours because of it. So every `relist` the watch is dropped and begun anew with a list. The old list stays in force
//! until the new one is complete, also while the API server does not answer.

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
use crate::listing::{ListedHost, ListedInstance, MAX_INSTANCES, SourceUpdate};

/// For a complete list; then it is begun anew.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Follows the pods of one selector.
pub(crate) struct PodWatcher {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    pub(crate) selector: String,
    pub(crate) options: KubernetesDiscoveryOptions,
    pub(crate) slot: usize,
    pub(crate) out: mpsc::Sender<SourceUpdate>,
}

/// By pod UID: a name comes back with another UID.
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

/// The pods as the events tell.
#[derive(Default)]
struct PodStore {
    current: ObservedPods,
    /// What a list in progress has told so far.
    incoming: ObservedPods,
    /// A complete list was seen by the running watch.
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
                gone = self.watch(&mut store, &mut sent) => if gone { return },
            }
        }
    }

    /// One list and its watch, until it is time to list again. Answers whether nobody listens any more.
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
                        tracing::warn!(selector = self.selector, "no complete pod list in time; begun anew");
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
                        "Kubernetes API failed, the last pod list stays in force; check the API server and that the service account may list and watch pods"
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
    /// Answers whether a list has just become complete.
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
