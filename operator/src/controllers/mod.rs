//! Controllers: watch, plan and write.

mod hook_client;
mod leader_election;
mod lease_connection;
mod other_release;
mod reconcile;
mod stalled;
mod timeouts;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use moongate_render::{GangScheduler, SizeLimits};
use moongate_runtime::Supervisor;
use moongate_telemetry::Tracer;
use tokio::sync::watch;
use tower::layer::layer_fn;
use tower::util::MapRequestLayer;

use crate::events::EventRecorder;
use crate::plan::PlanSettings;
use crate::resource_cache::{KindWatcher, ObservedCluster};
use crate::resource_writer::ResourceWriter;
use crate::webhooks::WebhookOwner;
use crate::{KubeClientError, OperatorMetrics, ResourceKind};

pub use leader_election::LeadershipLost;
pub use other_release::OwnedByOther;
pub use timeouts::ApiServerTimeouts;

/// Settings of the operator's controllers.
#[derive(Debug, Clone)]
pub struct OperatorOptions {
    /// Client configuration; `None` uses the pod's service account or the user's default.
    pub kubeconfig: Option<PathBuf>,
    /// Watch only this namespace; `None` watches all namespaces.
    pub namespace: Option<String>,
    /// Number of plans to carry out concurrently.
    pub workers: usize,
    /// Namespace and name of the Lease for leader election. `None`: no leader election.
    pub lease: Option<(String, String)>,
    /// Validity of the Lease without renewal.
    pub lease_duration: Duration,
    /// The scheduler that handles gangs.
    pub gang_scheduler: GangScheduler,
    /// Maximum numbers of objects that one object may request.
    pub size_limits: SizeLimits,
    /// Range of ports to allocate for pods; `None` turns allocation off.
    pub ports: Option<Range<u16>>,
    /// Timeouts of the API server.
    pub limits: ApiServerTimeouts,
    /// The release that owns the webhooks. While another one does, an operator of all namespaces reconciles nothing.
    pub webhook_owner: Option<watch::Receiver<WebhookOwner>>,
    pub metrics: Arc<OperatorMetrics>,
    pub traces: Tracer,
}

impl Default for OperatorOptions {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            namespace: None,
            workers: 10,
            lease: None,
            lease_duration: Duration::from_secs(15),
            gang_scheduler: GangScheduler::default(),
            size_limits: SizeLimits::default(),
            ports: None,
            limits: ApiServerTimeouts::default(),
            webhook_owner: None,
            metrics: Arc::default(),
            traces: Tracer::disabled(),
        }
    }
}

/// Error that stops the operator.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// No cluster is configured or reachable.
    #[error("cannot reach Kubernetes: {0}; set --kubeconfig, or run with a service account")]
    Client(#[from] KubeClientError),
    /// The HTTP client for hooks cannot be created.
    #[error("cannot create the HTTP client for hooks: {0}")]
    Hooks(#[from] reqwest::Error),
    #[error(transparent)]
    Lease(#[from] LeadershipLost),
    #[error(transparent)]
    Owner(#[from] OwnedByOther),
}

/// State shared by workers.
struct ControllerContext {
    cluster: Arc<ObservedCluster>,
    writer: ResourceWriter,
    plan_settings: PlanSettings,
    event_recorder: EventRecorder,
    hook_client: hook_client::HookClient,
    metrics: Arc<OperatorMetrics>,
    traces: Tracer,
}

/// Runs until the supervisor's token is cancelled, or leadership is lost.
///
/// # Errors
/// [`OperatorError`].
pub async fn run(options: OperatorOptions, supervisor: &Supervisor) -> Result<(), OperatorError> {
    let client = client(options.kubeconfig.as_deref(), options.limits, &options.metrics).await?;
    let stop = supervisor.token();
    // With a namespace of its own, a release runs besides the owner.
    let mut owner = options.webhook_owner.clone().filter(|_| options.namespace.is_none());
    if let Some(owner) = &mut owner {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = other_release::wait(owner, &options.metrics) => {}
        }
    }
    let lease_held = match &options.lease {
        Some((namespace, name)) => {
            let connection =
                lease_connection::LeaseConnection::open(options.kubeconfig.as_deref(), &options.metrics)
                    .await?;
            let lease =
                leader_election::LeaderLease::new(connection, namespace, name, options.lease_duration);
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                acquired = lease.acquire() => Some((lease, acquired)),
            }
        }
        None => None,
    };
    let metrics = options.metrics;
    metrics.set_leading(true);
    let (event_recorder, event_writer) = EventRecorder::new(client.clone(), Arc::clone(&metrics));
    let cluster = Arc::new(ObservedCluster::new(options.ports));
    let shared = Arc::new(ControllerContext {
        cluster: Arc::clone(&cluster),
        writer: ResourceWriter::new(client.clone()),
        plan_settings: PlanSettings {
            gang_scheduler: options.gang_scheduler,
            size_limits: options.size_limits,
        },
        event_recorder,
        hook_client: hook_client::HookClient::new(supervisor)?,
        metrics: Arc::clone(&metrics),
        traces: options.traces,
    });
    let working = stop.child_token();
    let writing = working.clone();
    supervisor.spawn_essential("operator events", async move {
        writing.run_until_cancelled(event_writer).await;
    });
    for kind in ResourceKind::ALL {
        let watcher = KindWatcher {
            cluster: Arc::clone(&cluster),
            client: client.clone(),
            namespace: options.namespace.clone(),
            kind,
            metrics: Arc::clone(&metrics),
        };
        supervisor.spawn_essential("operator watch", watcher.run(working.clone()));
    }
    for _ in 0..options.workers.max(1) {
        supervisor
            .spawn_essential("operator worker", reconcile::run_worker(Arc::clone(&shared), working.clone()));
    }
    let lost = async {
        match &lease_held {
            Some((lease, acquired)) => lease.renew_until_lost(*acquired).await,
            None => std::future::pending().await,
        }
    };
    let outcome = tokio::select! {
        () = stop.cancelled() => Ok(()),
        lost = lost => Err(OperatorError::from(lost)),
        other = other_release::taken_over(owner.as_mut()) => Err(other.into()),
    };
    working.cancel();
    metrics.set_leading(false);
    if let Some((lease, _)) = lease_held.filter(|_| outcome.is_ok()) {
        lease.release().await;
    }
    outcome
}

/// A client for the cluster of this kubeconfig, or of the process's environment. Its requests are counted, and have
/// timeouts.
///
/// # Errors
/// [`OperatorError::Client`].
pub async fn client(
    kubeconfig: Option<&Path>,
    limits: ApiServerTimeouts,
    metrics: &Arc<OperatorMetrics>,
) -> Result<Client, OperatorError> {
    let config = config(kubeconfig).await?;
    let builder = ClientBuilder::try_from(config).map_err(KubeClientError::Client)?;
    let limit = layer_fn(|service| timeouts::ResponseTimeoutService::new(service, limits));
    Ok(builder.with_layer(&count_requests(metrics)).with_layer(&limit).build())
}

fn count_requests(
    metrics: &Arc<OperatorMetrics>,
) -> MapRequestLayer<impl Fn(http::Request<Body>) -> http::Request<Body> + Clone + use<>> {
    let metrics = Arc::clone(metrics);
    MapRequestLayer::new(move |request: http::Request<Body>| {
        metrics.count_api_request(request.method().as_str());
        request
    })
}

async fn config(kubeconfig: Option<&Path>) -> Result<Config, KubeClientError> {
    let Some(path) = kubeconfig else { return Ok(Config::infer().await?) };
    let file = Kubeconfig::read_from(path)
        .map_err(|error| KubeClientError::File { path: path.to_owned(), error })?;
    Ok(Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?)
}
