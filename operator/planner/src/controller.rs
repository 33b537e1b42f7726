//! Starts, changes and ends the loops of all deployments of the file.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::join_all;
use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use moongate_capacity::PlannerState;
use moongate_runtime::{ClientTls, FileChangeWatcher, Supervisor};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::deployments_file::{self, DeploymentKey, DeploymentSpec, DeploymentsFileError};
use crate::scrape::GatewayClients;
use crate::{PlanBoard, PlannerMetrics, deployment};

/// Settings of the planner.
#[derive(Debug)]
pub struct PlannerOptions {
    /// Client configuration; `None` uses the pod's service account or the user's default.
    pub kubeconfig: Option<PathBuf>,
    /// The file of deployments.
    pub deployments: PathBuf,
    /// Namespace of the ConfigMaps with learned states.
    pub own_namespace: String,
    /// Decide, but write nothing.
    pub dry_run: bool,
    /// TLS settings for gateways with `https://` URLs.
    pub gateway_tls: ClientTls,
    pub metrics: Arc<PlannerMetrics>,
    pub plans: Arc<PlanBoard>,
}

/// Error that stops the planner.
#[derive(Debug, thiserror::Error)]
pub enum PlannerError {
    #[error(transparent)]
    File(#[from] DeploymentsFileError),
    #[error("cannot reach Kubernetes: {0}; set --kubeconfig, or run with a service account")]
    Client(#[from] KubeClientError),
    #[error("cannot create the HTTP client for gateways: {0}")]
    Http(#[from] reqwest::Error),
}

/// Why no client for the cluster could be created.
#[derive(Debug, thiserror::Error)]
pub enum KubeClientError {
    // kube's errors are not sources: the text has them already.
    #[error("--kubeconfig {}: {error}", path.display())]
    File { path: PathBuf, error: KubeconfigError },
    #[error("{0}")]
    Infer(InferConfigError),
    #[error("{0}")]
    Client(kube::Error),
}

/// What all deployments share.
pub(crate) struct PlannerContext {
    pub(crate) client: Client,
    pub(crate) own_namespace: String,
    pub(crate) dry_run: bool,
    pub(crate) gateways: GatewayClients,
    pub(crate) metrics: Arc<PlannerMetrics>,
    pub(crate) plans: Arc<PlanBoard>,
    /// States of loops that have ended, for those that replace them.
    pub(crate) carried_states: Mutex<HashMap<DeploymentKey, PlannerState>>,
}

struct RunningDeployment {
    spec: Arc<DeploymentSpec>,
    stop: CancellationToken,
    ended: JoinHandle<()>,
}

/// Runs until the supervisor's token is cancelled, and then until all states are written.
///
/// # Errors
/// [`PlannerError`]: the file is invalid at the start, or no cluster is configured.
pub async fn run(options: PlannerOptions, supervisor: &Supervisor) -> Result<(), PlannerError> {
    // Created first, so that no change is missed.
    let changes = FileChangeWatcher::new(vec![options.deployments.clone()]);
    let specs = deployments_file::read(&options.deployments)?;
    let context = Arc::new(PlannerContext {
        client: client(options.kubeconfig.as_deref()).await?,
        own_namespace: options.own_namespace,
        dry_run: options.dry_run,
        gateways: GatewayClients::new(options.gateway_tls.clone())?,
        metrics: options.metrics,
        plans: options.plans,
        carried_states: Mutex::default(),
    });
    context.metrics.set_dry_run(context.dry_run);
    let stop = supervisor.token();
    supervisor.spawn("planner gateway CA", options.gateway_tls.reload_on_change(stop.clone()));
    let changed = Arc::new(Notify::new());
    let notify = Arc::clone(&changed);
    supervisor.spawn_essential(
        "planner deployments file",
        changes.watch(stop.clone(), move || notify.notify_one()),
    );
    let mut controller = DeploymentSet { context, supervisor: supervisor.clone(), running: BTreeMap::new() };
    controller.apply(specs).await;
    controller.context.metrics.set_started();
    while stop.run_until_cancelled(changed.notified()).await.is_some() {
        controller.reload(&options.deployments).await;
    }
    controller.end_all().await;
    Ok(())
}

async fn client(kubeconfig: Option<&Path>) -> Result<Client, KubeClientError> {
    let config = match kubeconfig {
        None => Config::infer().await.map_err(KubeClientError::Infer)?,
        Some(path) => {
            let unusable = |error| KubeClientError::File { path: path.to_owned(), error };
            let file = Kubeconfig::read_from(path).map_err(unusable)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(unusable)?
        }
    };
    Client::try_from(config).map_err(KubeClientError::Client)
}

/// The loops of all deployments.
struct DeploymentSet {
    context: Arc<PlannerContext>,
    supervisor: Supervisor,
    running: BTreeMap<DeploymentKey, RunningDeployment>,
}

impl DeploymentSet {
    /// Reads the changed file. An invalid one keeps the previous deployments, so that an editing mistake stops no scaling.
    async fn reload(&mut self, path: &Path) {
        match deployments_file::read(path) {
            Ok(specs) => {
                tracing::info!(deployments = specs.len(), "reloaded --deployments");
                self.context.metrics.count_reload(true);
                self.apply(specs).await;
            }
            Err(error) => {
                tracing::warn!(%error, "reload failed; keeping the previous deployments");
                self.context.metrics.count_reload(false);
            }
        }
    }

    /// Ends the loops of removed and changed deployments, and starts those of new and changed ones.
    async fn apply(&mut self, specs: Vec<DeploymentSpec>) {
        let specs: BTreeMap<DeploymentKey, DeploymentSpec> =
            specs.into_iter().map(|spec| (spec.key.clone(), spec)).collect();
        let is_other = |running: &RunningDeployment| specs.get(&running.spec.key) != Some(&*running.spec);
        let others: Vec<DeploymentKey> = self
            .running
            .values()
            .filter(|running| is_other(running))
            .map(|running| running.spec.key.clone())
            .collect();
        self.end(&others).await;
        for key in others.iter().filter(|key| !specs.contains_key(key)) {
            self.context.metrics.remove(key);
            self.context.plans.remove(key);
            self.context.carried_states.lock().remove(key);
        }
        for (key, spec) in specs {
            if !self.running.contains_key(&key) {
                self.start(spec);
            }
        }
    }

    fn start(&mut self, spec: DeploymentSpec) {
        let (key, spec) = (spec.key.clone(), Arc::new(spec));
        self.context.plans.add(&key);
        let stop = CancellationToken::new();
        let (context, of_loop, token) = (Arc::clone(&self.context), Arc::clone(&spec), stop.clone());
        let make = move || deployment::run(Arc::clone(&context), Arc::clone(&of_loop), token.clone());
        let ended = self.supervisor.spawn_restarted("planner deployment", make);
        self.running.insert(key, RunningDeployment { spec, stop, ended });
    }

    async fn end(&mut self, keys: &[DeploymentKey]) {
        let ending: Vec<RunningDeployment> = keys.iter().filter_map(|key| self.running.remove(key)).collect();
        ending.iter().for_each(|running| running.stop.cancel());
        // A panic has been logged by the supervisor.
        let _panics = join_all(ending.into_iter().map(|running| running.ended)).await;
    }

    async fn end_all(&mut self) {
        let keys: Vec<DeploymentKey> = self.running.keys().cloned().collect();
        self.end(&keys).await;
    }
}
