//! The command `moongate planner`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use moongate_planner::{PlannerError, PlannerOptions, admin};
use moongate_runtime::{ClientTls, ClientTlsFiles, Supervisor, TlsConfigError, bind, terminated};
use moongate_telemetry::LoggingArgs;

use crate::settings::{invalid_settings, start_error};

/// Time for the loops of deployments to end, and to write what they have learned.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(15);

/// Flags of `moongate planner`.
#[derive(Debug, Args)]
pub(crate) struct PlannerArgs {
    /// YAML file with the deployments to scale; reloaded on change
    #[arg(long, value_name = "FILE", env = "MOONGATE_PLANNER_DEPLOYMENTS")]
    deployments: PathBuf,

    /// Decide, but write nothing: neither replicas nor what was learned
    #[arg(long, env = "MOONGATE_PLANNER_DRY_RUN")]
    dry_run: bool,

    /// Client configuration. Default: the pod's service account, or the user's default configuration
    #[arg(long, value_name = "FILE", env = "MOONGATE_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,

    /// Namespace of the ConfigMaps with what was learned
    #[arg(long, value_name = "NAMESPACE", env = "POD_NAMESPACE", default_value = "default")]
    own_namespace: String,

    /// Listen address of `/healthz`, `/readyz`, `/plan` and `/metrics`
    #[arg(long, value_name = "ADDRESS", env = "MOONGATE_ADMIN_LISTEN", default_value = "0.0.0.0:8083")]
    admin_listen: SocketAddr,

    #[command(flatten)]
    tls: GatewayTlsArgs,

    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

#[derive(Debug, Args)]
struct GatewayTlsArgs {
    /// CA certificates (PEM) for gateways with https:// URLs; reloaded on change. Default: the system store
    #[arg(long, value_name = "FILE", env = "MOONGATE_PLANNER_GATEWAY_CA")]
    gateway_ca: Option<PathBuf>,

    /// Client certificate (PEM) for gateways that require one; reloaded on change
    #[arg(long, value_name = "FILE", env = "MOONGATE_PLANNER_GATEWAY_TLS_CERT")]
    gateway_tls_cert: Option<PathBuf>,

    /// Private key (PEM) for --gateway-tls-cert
    #[arg(long, value_name = "FILE", env = "MOONGATE_PLANNER_GATEWAY_TLS_KEY")]
    gateway_tls_key: Option<PathBuf>,

    /// Expected name in the gateways' certificates. Default: the host in each URL
    #[arg(long, value_name = "NAME", env = "MOONGATE_PLANNER_GATEWAY_TLS_NAME")]
    gateway_tls_name: Option<String>,
}

impl GatewayTlsArgs {
    fn load(&self) -> Result<ClientTls, TlsConfigError> {
        let identity = [self.gateway_tls_cert.as_ref(), self.gateway_tls_key.as_ref()];
        let flags = ["--gateway-tls-cert", "--gateway-tls-key"];
        let (ca, name) = (self.gateway_ca.as_ref(), self.gateway_tls_name.as_ref());
        let files = ClientTlsFiles::from_options(ca, identity, name, flags);
        let paths = [("--gateway-ca", ca), (flags[0], identity[0]), (flags[1], identity[1])];
        files.and_then(ClientTls::load).map_err(|error| error.with_flag(&paths))
    }
}

/// Runs the planner until it is terminated.
pub(crate) async fn run(command: PlannerArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let options = PlannerOptions {
        kubeconfig: command.kubeconfig,
        deployments: command.deployments,
        own_namespace: command.own_namespace,
        dry_run: command.dry_run,
        gateway_tls: command.tls.load().map_err(invalid_settings)?,
        metrics: Arc::default(),
        plans: Arc::default(),
    };
    let (metrics, plans) = (Arc::clone(&options.metrics), Arc::clone(&options.plans));
    admin::start(bind(command.admin_listen)?, metrics, plans, &supervisor);
    let stop = supervisor.token();
    let mut running = std::pin::pin!(moongate_planner::run(options, &supervisor));
    tokio::select! {
        result = &mut running => result.map_err(planner_error)?,
        () = terminated() => {
            stop.cancel();
            // Without an answer of the API server, what was learned since the last write is lost.
            if tokio::time::timeout(SHUTDOWN_GRACE, running).await.is_err() {
                tracing::warn!("what was learned since the last write could not be written");
            }
        }
    }
    if let Err(stuck) = supervisor.shutdown(SHUTDOWN_GRACE).await {
        tracing::warn!("{stuck}");
    }
    Ok(ExitCode::SUCCESS)
}

fn planner_error(error: PlannerError) -> anyhow::Error {
    let is_invalid = matches!(error, PlannerError::File(_) | PlannerError::Client(_));
    start_error(error, is_invalid)
}
