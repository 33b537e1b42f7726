//! One role in the cluster: its scale subresource, and a watch of its pods.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, Error as WatchError, Event, watcher};
use kube::{Api, Client};
use moongate_capacity::RoleReplicas;
use moongate_runtime::LogRateLimiter;

use crate::deployments_file::{DeploymentKey, ScaledRole};
use crate::replicas::{RolePods, adjust_to_target};
use crate::scale_target::{ScaleClient, ScaleReading, ScaleRequestError, ScaleTarget};

/// Lifetime of a reading of a scale subresource, which cannot be watched. Its pods are, and a write is refused if the reading is outdated.
const READING_LIFETIME: Duration = Duration::from_secs(180);
/// Lifetime while the pods differ from it: something else may have changed it.
const DOUBTFUL_LIFETIME: Duration = Duration::from_secs(15);
/// How long a watch may fail until the pods are listed again: a watch that has resumed shows nothing until a pod changes.
const MAX_WATCH_FAILURE: Duration = Duration::from_secs(30);
/// How long a decision waits for a list of pods.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// Pods per page of a list.
const PAGE: u32 = 100;
/// Attempts of one write, in case of conflicts.
const MAX_WRITE_ATTEMPTS: usize = 3;

type PodEvents = BoxStream<'static, Result<Event<Pod>, WatchError>>;

/// Why the replicas of a role are not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnknownReplicas {
    #[error("the scale subresource of {target} cannot be read: {error}")]
    Scale { target: ScaleTarget, error: ScaleRequestError },
    #[error("the scale subresource of {0} has no selector yet; its controller writes it")]
    NoSelector(ScaleTarget),
    #[error("the pods of {0} cannot be listed; the log has the reason")]
    NotListed(ScaleTarget),
}

/// Result of a write.
#[derive(Debug)]
pub(crate) enum WriteOutcome {
    Written,
    /// Something else has changed the replicas; the next decision takes it into account.
    Overtaken,
    Failed,
}

/// The replicas of one role.
pub(crate) struct RoleTracker {
    pub(crate) role: ScaledRole,
    pub(crate) target: ScaleTarget,
    deployment: DeploymentKey,
    client: Client,
    scale: ScaleClient,
    reading: Option<(Instant, ScaleReading)>,
    /// Unix time at which the target got its present number of replicas, as far as observed.
    changed_s: f64,
    watch: Option<PodWatch>,
    watch_log: LogRateLimiter,
    write_log: LogRateLimiter,
}

struct PodWatch {
    selector: String,
    events: PodEvents,
    pods: RolePods,
    is_listed: bool,
    failing_since: Option<Instant>,
}

impl RoleTracker {
    pub(crate) fn new(
        client: Client,
        deployment: &DeploymentKey,
        role: ScaledRole,
        target: &ScaleTarget,
    ) -> Self {
        Self {
            role,
            target: target.clone(),
            deployment: deployment.clone(),
            scale: ScaleClient::new(client.clone(), &deployment.namespace, target),
            client,
            reading: None,
            changed_s: 0.0,
            watch: None,
            watch_log: LogRateLimiter::new(),
            write_log: LogRateLimiter::new(),
        }
    }

    /// Applies the next event of the watch. Cancelling it loses no event.
    pub(crate) async fn next_event(&mut self) {
        let Some(watch) = &mut self.watch else { return std::future::pending().await };
        match watch.events.next().await {
            Some(Ok(event)) => watch.apply(event),
            Some(Err(error)) => {
                watch.failing_since.get_or_insert_with(Instant::now);
                if self.watch_log.is_due() {
                    let (deployment, target) = (&self.deployment, &self.target);
                    tracing::warn!(%deployment, %target, %error, "the watch of pods failed; restarting. Check the planner's role");
                }
            }
            // The stream of a watcher does not end.
            None => self.watch = None,
        }
    }

    /// The replicas now. Reads the scale subresource if the last reading is old.
    pub(crate) async fn replicas(&mut self, now_s: f64) -> Result<RoleReplicas, UnknownReplicas> {
        let is_doubtful = match (&self.reading, &self.watch) {
            (Some((_, reading)), Some(watch)) => {
                watch.pods.counts().current() != reading.replicas || !watch.is_listed
            }
            _ => true,
        };
        let lifetime = if is_doubtful { DOUBTFUL_LIFETIME } else { READING_LIFETIME };
        if self.reading.as_ref().is_none_or(|(since, _)| since.elapsed() >= lifetime) {
            self.read(now_s)
                .await
                .map_err(|error| UnknownReplicas::Scale { target: self.target.clone(), error })?;
        }
        if self.watch.as_ref().is_some_and(PodWatch::is_outdated) {
            self.watch = self
                .watch
                .take()
                .map(|watch| PodWatch::new(&self.client, &self.deployment.namespace, watch.selector));
        }
        let listed = async {
            while self.watch.as_ref().is_some_and(|watch| !watch.is_listed) {
                self.next_event().await;
            }
        };
        // Without a list, the replicas are not known below.
        let _timed_out = tokio::time::timeout(LIST_TIMEOUT, listed).await;
        let no_selector = || UnknownReplicas::NoSelector(self.target.clone());
        let (_, reading) = self.reading.as_ref().ok_or_else(no_selector)?;
        let watch = self.watch.as_ref().ok_or_else(no_selector)?;
        if !watch.is_listed {
            return Err(UnknownReplicas::NotListed(self.target.clone()));
        }
        Ok(adjust_to_target(watch.pods.counts(), reading.replicas, self.changed_s))
    }

    /// Replicas of the target at its last reading.
    pub(crate) fn target_replicas(&self) -> Option<u32> {
        self.reading.as_ref().map(|(_, reading)| reading.replicas)
    }

    async fn read(&mut self, now_s: f64) -> Result<(), ScaleRequestError> {
        match self.scale.read().await {
            Ok(reading) => {
                self.set_reading(reading, now_s);
                Ok(())
            }
            Err(error) => {
                self.reading = None;
                Err(error)
            }
        }
    }

    fn set_reading(&mut self, reading: ScaleReading, now_s: f64) {
        if self.target_replicas() != Some(reading.replicas) {
            self.changed_s = now_s;
        }
        if self.watch.as_ref().map(|watch| &watch.selector) != reading.selector.as_ref() {
            let selector = reading.selector.clone();
            self.watch =
                selector.map(|selector| PodWatch::new(&self.client, &self.deployment.namespace, selector));
        }
        self.reading = Some((Instant::now(), reading));
    }

    /// Writes the wanted replicas, unless something else has changed them since they were read. `count` is called with the result of each attempt.
    pub(crate) async fn write(
        &mut self,
        wanted: u32,
        now_s: f64,
        count: impl Fn(&'static str),
    ) -> WriteOutcome {
        let (deployment, target) = (self.deployment.clone(), self.target.clone());
        for _ in 0..MAX_WRITE_ATTEMPTS {
            let Some((_, last)) = self.reading.clone() else { return WriteOutcome::Failed };
            match self.scale.write(&last, wanted).await {
                Ok(reading) => {
                    count("written");
                    self.set_reading(reading, now_s);
                    return WriteOutcome::Written;
                }
                Err(ScaleRequestError::Conflict) => {
                    count(ScaleRequestError::Conflict.label());
                    if let Err(error) = self.read(now_s).await {
                        count(error.label());
                        self.log_failed_write(wanted, &error);
                        return WriteOutcome::Failed;
                    }
                    if self.target_replicas() != Some(last.replicas) {
                        tracing::info!(%deployment, %target, replicas = self.target_replicas(), "something else has scaled it; deciding again");
                        return WriteOutcome::Overtaken;
                    }
                }
                Err(error) => {
                    count(error.label());
                    self.log_failed_write(wanted, &error);
                    return WriteOutcome::Failed;
                }
            }
        }
        self.log_failed_write(wanted, &ScaleRequestError::Conflict);
        WriteOutcome::Failed
    }

    fn log_failed_write(&self, wanted: u32, error: &ScaleRequestError) {
        if self.write_log.is_due() {
            let (deployment, target) = (&self.deployment, &self.target);
            tracing::warn!(%deployment, %target, wanted, %error, "scaling failed; it is repeated in the next interval");
        }
    }
}

impl PodWatch {
    fn new(client: &Client, namespace: &str, selector: String) -> Self {
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let config = Config::default().labels(&selector).page_size(PAGE);
        Self {
            selector,
            events: watcher(pods, config).default_backoff().boxed(),
            pods: RolePods::default(),
            is_listed: false,
            failing_since: None,
        }
    }

    fn is_outdated(&self) -> bool {
        self.failing_since.is_some_and(|since| since.elapsed() > MAX_WATCH_FAILURE)
    }

    fn apply(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.pods.begin_list(),
            Event::InitApply(pod) => self.pods.list(&pod),
            Event::InitDone => {
                self.pods.end_list();
                self.is_listed = true;
                self.failing_since = None;
            }
            Event::Apply(pod) => {
                self.pods.apply(&pod);
                self.failing_since = None;
            }
            Event::Delete(pod) => {
                self.pods.delete(&pod);
                self.failing_since = None;
            }
        }
    }
}
