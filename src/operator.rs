//! `moongate operator`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use moongate_operator::Options;
use moongate_runtime::{Supervisor, terminated};
use moongate_telemetry::LogOptions;

/// For writes in progress when the operator is asked to stop.
const GRACE: Duration = Duration::from_secs(10);

/// Flags of `moongate operator`.
#[derive(Debug, Args)]
pub(crate) struct OperatorCommand {
    /// Client configuration. Without it the pod's service account is used, or your default one
    #[arg(long, value_name = "FILE", env = "MOONGATE_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,

    /// The only namespace to look after. Without it, all
    #[arg(long, value_name = "NAMESPACE", env = "MOONGATE_NAMESPACE")]
    namespace: Option<String>,

    /// Objects that are worked on at a time
    #[arg(long, value_name = "NUMBER", env = "MOONGATE_MAX_CONCURRENT_RECONCILES", default_value_t = 10)]
    max_concurrent_reconciles: usize,

    /// Let one of several operators work, by the Lease `rbg-controller`
    #[arg(long, env = "MOONGATE_LEADER_ELECT")]
    leader_elect: bool,

    /// Namespace of that Lease
    #[arg(long, value_name = "NAMESPACE", env = "POD_NAMESPACE", default_value = "default")]
    lease_namespace: String,

    #[command(flatten)]
    pub(crate) logs: LogOptions,
}

/// Keeps groups running until asked to stop, or until another operator leads.
pub(crate) async fn run(command: OperatorCommand, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let options = Options {
        kubeconfig: command.kubeconfig,
        namespace: command.namespace,
        workers: command.max_concurrent_reconciles,
        lease: command.leader_elect.then(|| (command.lease_namespace, "rbg-controller".to_owned())),
        ..Options::default()
    };
    let stop = supervisor.token();
    let mut running = std::pin::pin!(moongate_operator::run(options, &supervisor));
    tokio::select! {
        ended = &mut running => ended?,
        () = terminated() => {
            stop.cancel();
            running.await?;
        }
    }
    if let Err(still) = supervisor.shutdown(GRACE).await {
        tracing::warn!("{still}");
    }
    Ok(ExitCode::SUCCESS)
}
