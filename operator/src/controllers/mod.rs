//! Loops over observe, plan, write.

mod hook_client;
mod leader_election;
mod queue;
mod reconcile;
mod timeouts;
mod watch;

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use moongate_render::GangScheduler;
use moongate_runtime::Supervisor;
use moongate_telemetry::Tracer;
use parking_lot::Mutex;
use tower::layer::layer_fn;
use tower::util::MapRequestLayer;

use crate::events::EventRecorder;
use crate::resource_cache::ResourceCache;
use crate::resource_writer::ResourceWriter;
use crate::{OperatorMetrics, ResourceKind};

pub use leader_election::LeadershipLost;
pub use timeouts::ApiServerTimeouts;

/// How the operator runs.
#[derive(Debug, Clone)]
pub struct OperatorOptions {
    /// Client configuration; `None`: the pod's service account, or the user's default.
    pub kubeconfig: Option<PathBuf>,
    /// The only namespace to look after; `None`: all.
    pub namespace: Option<String>,
    /// Plans that are carried out at a time.
    pub workers: usize,
    /// Where the Lease is by which several operators settle who works: namespace and name. `None`: this one works.
    pub lease: Option<(String, String)>,
    /// Time for which the Lease holds without being renewed.
    pub lease_duration: Duration,
    /// Who schedules gangs.
    pub gang_scheduler: GangScheduler,
    /// Ports that may be chosen for pods that ask for some; `None`: none are chosen.
    pub ports: Option<Range<u16>>,
    /// How long the API server may be silent.
    pub limits: ApiServerTimeouts,
    /// Where the operator counts.
    pub metrics: Arc<OperatorMetrics>,
    /// Where its looks at objects are traced.
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
            ports: None,
            limits: ApiServerTimeouts::default(),
            metrics: Arc::default(),
            traces: Tracer::disabled(),
        }
    }
}

/// The operator cannot work.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// There is no cluster to talk to.
    #[error("cannot reach Kubernetes: {0}; give --kubeconfig, or run with a service account")]
    Client(String),
    /// Pods cannot be asked.
    #[error("cannot make HTTP requests: {0}")]
    Hooks(#[from] reqwest::Error),
    /// Somebody else leads now.
    #[error(transparent)]
    Lease(#[from] LeadershipLost),
}

/// What watches and workers share.
struct ControllerContext {
    client: Client,
    namespace: Option<String>,
    writer: ResourceWriter,
    observed: Mutex<ResourceCache>,
    queue: queue::ReconcileQueue,
    listed: tokio::sync::watch::Sender<BTreeSet<ResourceKind>>,
    gang_scheduler: GangScheduler,
    event_recorder: EventRecorder,
    hook_client: hook_client::HookClient,
    metrics: Arc<OperatorMetrics>,
    traces: Tracer,
}

/// Runs until the supervisor's token is cancelled, or the lead is lost.
///
/// # Errors
/// [`OperatorError`].
pub async fn run(options: OperatorOptions, supervisor: &Supervisor) -> Result<(), OperatorError> {
    let client = client(options.kubeconfig.as_deref(), options.limits, &options.metrics).await?;
    let stop = supervisor.token();
    let lead = match &options.lease {
        Some((namespace, name)) => {
            let lease =
                leader_election::LeaderLease::new(client.clone(), namespace, name, options.lease_duration);
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = lease.acquire() => Some(lease),
            }
        }
        None => None,
    };
    let metrics = options.metrics;
    metrics.set_leading(true);
    let (teller, telling) = EventRecorder::new(client.clone(), Arc::clone(&metrics));
    let shared = Arc::new(ControllerContext {
        writer: ResourceWriter::new(client.clone()),
        client,
        namespace: options.namespace,
        observed: Mutex::new(ResourceCache::with_ports(options.ports)),
        queue: queue::ReconcileQueue::default(),
        listed: tokio::sync::watch::Sender::new(BTreeSet::new()),
        gang_scheduler: options.gang_scheduler,
        event_recorder: teller,
        hook_client: hook_client::HookClient::new(supervisor)?,
        metrics: Arc::clone(&metrics),
        traces: options.traces,
    });
    let working = stop.child_token();
    let told = working.clone();
    supervisor.spawn_essential("operator events", async move {
        told.run_until_cancelled(telling).await;
    });
    for kind in ResourceKind::ALL {
        supervisor
            .spawn_essential("operator watch", watch::watch_kind(Arc::clone(&shared), kind, working.clone()));
    }
    for _ in 0..options.workers.max(1) {
        supervisor
            .spawn_essential("operator worker", reconcile::run_worker(Arc::clone(&shared), working.clone()));
    }
    let outcome = match &lead {
        Some(lease) => tokio::select! {
            () = stop.cancelled() => Ok(()),
            lost = lease.renew_until_lost() => Err(lost.into()),
        },
        None => {
            stop.cancelled().await;
            Ok(())
        }
    };
    working.cancel();
    metrics.set_leading(false);
    if let Some(lease) = lead.filter(|_| outcome.is_ok()) {
        lease.release().await;
    }
    outcome
}

/// What an error of kube says. It quotes a path that is in quotes already.
pub(crate) fn error_text(error: &dyn std::fmt::Display) -> String {
    error.to_string().replace("'\"", "'").replace("\"'", "'")
}

/// A client of the cluster that this file names, or that the process runs in. Its requests are counted, and none waits for ever.
///
/// # Errors
/// [`OperatorError::Client`].
pub async fn client(
    kubeconfig: Option<&Path>,
    limits: ApiServerTimeouts,
    metrics: &Arc<OperatorMetrics>,
) -> Result<Client, OperatorError> {
    let failed = |error: &dyn std::fmt::Display| OperatorError::Client(error_text(error));
    let config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .map_err(|error| failed(&format!("--kubeconfig {}: {error}", path.display())))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(|error| failed(&error))?
        }
        None => Config::infer().await.map_err(|error| failed(&error))?,
    };
    let metrics = Arc::clone(metrics);
    let count = MapRequestLayer::new(move |request: http::Request<Body>| {
        metrics.count_api_request(request.method().as_str());
        request
    });
    let builder = ClientBuilder::try_from(config).map_err(|error| failed(&error))?;
    let limit = layer_fn(|service| timeouts::ResponseTimeoutService::new(service, limits));
    Ok(builder.with_layer(&count).with_layer(&limit).build())
}
