//! Watches: one per kind, shared by all controllers.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt};
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher::{Error as WatchError, Event, watcher};
use kube::runtime::{WatchStreamExt, watcher::Config};
use kube::{Client, Error};
use tokio_util::sync::CancellationToken;

use super::observed_cluster::ObservedCluster;
use crate::{OperatorMetrics, ResourceKind};

/// Interval between checks whether a kind is served by now.
const ABSENT_RECHECK: Duration = Duration::from_secs(30);
/// Interval after an error of the API server.
const UNKNOWN_RECHECK: Duration = Duration::from_secs(1);

/// Objects per page of a list. While a page is decoded, it takes ten times the memory of its cached objects.
const PAGE: u32 = 50;

/// Watches the objects of one kind.
pub(crate) struct KindWatcher {
    pub(crate) cluster: Arc<ObservedCluster>,
    pub(crate) client: Client,
    /// Watch only this namespace; `None` watches all namespaces.
    pub(crate) namespace: Option<String>,
    pub(crate) kind: ResourceKind,
    pub(crate) metrics: Arc<OperatorMetrics>,
}

impl KindWatcher {
    /// Watches until stopped.
    pub(crate) async fn run(self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.watch() => {}
        }
    }

    /// Waits until the API server serves the kind. Other kinds are processed meanwhile.
    async fn wait_until_served(&self) {
        let (kind, resource) = (self.kind, self.kind.resource());
        loop {
            let pause = match self.client.list_api_group_resources(&resource.api_version).await {
                Ok(list) if list.resources.iter().any(|served| served.name == resource.plural) => break,
                Ok(_) => ABSENT_RECHECK,
                Err(Error::Api(status)) if status.code == 404 => ABSENT_RECHECK,
                Err(error) => {
                    log_watch_error(kind, &error);
                    UNKNOWN_RECHECK
                }
            };
            if pause == ABSENT_RECHECK {
                self.cluster.set_absent(kind);
                self.mark_listed();
            }
            tokio::time::sleep(pause).await;
        }
        self.cluster.set_served(kind);
    }

    async fn watch(&self) {
        if self.kind.is_optional() {
            self.wait_until_served().await;
        }
        let mut events = pin!(self.events().default_backoff());
        let mut era = 0;
        loop {
            match events.try_next().await {
                Ok(Some(event)) => {
                    self.cluster.apply_event(self.kind, event, &mut era);
                    if era > 0 && self.cluster.is_newly_listed(self.kind) {
                        self.mark_listed();
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    self.metrics.watch_failed(self.kind);
                    log_watch_error(self.kind, &error);
                    // Without permission for nodes, the operator runs without them; without permission for profiles, only groups that
                    // use one fail.
                    if self.kind == ResourceKind::Node || self.kind.is_of_cluster() && is_refusal(&error) {
                        self.mark_listed();
                    }
                }
            }
        }
    }

    fn mark_listed(&self) {
        if self.cluster.mark_listed(self.kind) {
            self.metrics.set_synced();
        }
    }

    fn events(&self) -> WatchEventStream {
        let (client, resource) = (self.client.clone(), self.kind.resource());
        let mut config = Config::default().page_size(PAGE);
        if let Some(selector) = self.kind.selector() {
            config = config.labels(selector);
        }
        match &self.namespace {
            Some(namespace) if !self.kind.is_of_cluster() => {
                watcher(Api::namespaced_with(client, namespace, &resource), config).boxed()
            }
            _ => watcher(Api::all_with(client, &resource), config).boxed(),
        }
    }
}

fn is_refusal(error: &WatchError) -> bool {
    matches!(error, WatchError::InitialListFailed(Error::Api(status)) if status.code == 403)
}

type WatchEventStream = BoxStream<'static, Result<Event<DynamicObject>, WatchError>>;

fn log_watch_error(kind: ResourceKind, error: &dyn std::error::Error) {
    let kind = kind.name();
    tracing::warn!(kind, %error, "watch failed; restarting. Check the API server and the operator's role");
}
