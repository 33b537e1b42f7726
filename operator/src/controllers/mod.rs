//! Loops over observe, plan, write.

mod ask;
mod leader;
mod limits;
mod queue;
mod reconcile;
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
use moongate_telemetry::Traces;
use parking_lot::Mutex;
use tower::layer::layer_fn;
use tower::util::MapRequestLayer;

use crate::apply::Writer;
use crate::events::Teller;
use crate::observed::Observed;
use crate::{Kind, Metrics};

pub use leader::LeaseError;
pub use limits::TimeLimits;

/// How the operator runs.
#[derive(Debug, Clone)]
pub struct Options {
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
    pub gang: GangScheduler,
    /// Ports that may be chosen for pods that ask for some; `None`: none are chosen.
    pub ports: Option<Range<u16>>,
    /// How long the API server may be silent.
    pub limits: TimeLimits,
    /// Where the operator counts.
    pub metrics: Arc<Metrics>,
    /// Where its looks at objects are traced.
    pub traces: Traces,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            namespace: None,
            workers: 10,
            lease: None,
            lease_duration: Duration::from_secs(15),
            gang: GangScheduler::default(),
            ports: None,
            limits: TimeLimits::default(),
            metrics: Arc::default(),
            traces: Traces::off(),
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
    Lease(#[from] LeaseError),
}

/// What watches and workers share.
struct Shared {
    client: Client,
    namespace: Option<String>,
    writer: Writer,
    observed: Mutex<Observed>,
    queue: queue::Queue,
    listed: tokio::sync::watch::Sender<BTreeSet<Kind>>,
    gang: GangScheduler,
    teller: Teller,
    asker: ask::Asker,
    metrics: Arc<Metrics>,
    traces: Traces,
}

/// Runs until the supervisor's token is cancelled, or the lead is lost.
///
/// # Errors
/// [`OperatorError`].
pub async fn run(options: Options, supervisor: &Supervisor) -> Result<(), OperatorError> {
    let client = client(options.kubeconfig.as_deref(), options.limits, &options.metrics).await?;
    let stop = supervisor.token();
    let lead = match &options.lease {
        Some((namespace, name)) => {
            let lease = leader::Lease::new(client.clone(), namespace, name, options.lease_duration);
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = lease.acquire() => Some(lease),
            }
        }
        None => None,
    };
    let metrics = options.metrics;
    metrics.leads(true);
    let (teller, telling) = Teller::new(client.clone(), Arc::clone(&metrics));
    let shared = Arc::new(Shared {
        writer: Writer::new(client.clone()),
        client,
        namespace: options.namespace,
        observed: Mutex::new(Observed::with_ports(options.ports)),
        queue: queue::Queue::default(),
        listed: tokio::sync::watch::Sender::new(BTreeSet::new()),
        gang: options.gang,
        teller,
        asker: ask::Asker::new(supervisor)?,
        metrics: Arc::clone(&metrics),
        traces: options.traces,
    });
    let working = stop.child_token();
    let told = working.clone();
    supervisor.spawn_essential("operator events", async move {
        told.run_until_cancelled(telling).await;
    });
    for kind in Kind::ALL {
        supervisor
            .spawn_essential("operator watch", watch::follow(Arc::clone(&shared), kind, working.clone()));
    }
    for _ in 0..options.workers.max(1) {
        supervisor.spawn_essential("operator worker", reconcile::work(Arc::clone(&shared), working.clone()));
    }
    let outcome = match &lead {
        Some(lease) => tokio::select! {
            () = stop.cancelled() => Ok(()),
            lost = lease.keep() => Err(lost.into()),
        },
        None => {
            stop.cancelled().await;
            Ok(())
        }
    };
    working.cancel();
    metrics.leads(false);
    if let Some(lease) = lead.filter(|_| outcome.is_ok()) {
        lease.release().await;
    }
    outcome
}

/// What an error of kube says. It quotes a path that is in quotes already.
pub(crate) fn words(error: &dyn std::fmt::Display) -> String {
    error.to_string().replace("'\"", "'").replace("\"'", "'")
}

/// A client of the cluster that this file names, or that the process runs in. Its requests are counted, and none waits for ever.
///
/// # Errors
/// [`OperatorError::Client`].
pub async fn client(
    kubeconfig: Option<&Path>,
    limits: TimeLimits,
    metrics: &Arc<Metrics>,
) -> Result<Client, OperatorError> {
    let failed = |error: &dyn std::fmt::Display| OperatorError::Client(words(error));
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
        metrics.asked(request.method().as_str());
        request
    });
    let builder = ClientBuilder::try_from(config).map_err(|error| failed(&error))?;
    let limit = layer_fn(|service| limits::Limited::new(service, limits));
    Ok(builder.with_layer(&count).with_layer(&limit).build())
}
