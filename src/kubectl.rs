//! The command `moongate kubectl`, also run as `kubectl moongate` when the binary is named `kubectl-moongate`: show groups,
//! preview changes, apply them and roll them back.

mod change;
mod doctor;
mod rollout;
mod status;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use moongate_operator::kubectl::{ClusterClient, KubeContextOptions, OutputFormat};
use moongate_telemetry::LoggingArgs;
use serde_json::Value;

/// Name of the binary as a kubectl plugin.
const PLUGIN: &str = "kubectl-moongate";

/// Logs of the Kubernetes client are off: the command prints errors itself, with more detail.
pub(crate) fn logs() -> LoggingArgs {
    LoggingArgs { filter: "warn,kube_client=off".to_owned(), ..LoggingArgs::default() }
}

/// Flags of `moongate kubectl`.
#[derive(Debug, Args)]
pub(crate) struct KubectlArgs {
    #[command(subcommand)]
    command: KubectlSubcommand,
    #[command(flatten)]
    scope: KubectlScopeArgs,
}

#[derive(Debug, Subcommand)]
enum KubectlSubcommand {
    /// Show groups and what they are waiting for.
    Status(status::KubectlStatusArgs),
    /// Show which pods a change would restart, in which order and why. Read-only.
    Plan(change::KubectlPlanArgs),
    /// Set container images and roll them out.
    Upgrade(change::KubectlUpgradeArgs),
    /// Manage revisions and updates of a group.
    Rollout {
        #[command(subcommand)]
        command: rollout::RolloutSubcommand,
    },
    /// Check whether the cluster has what groups need, and print a fix for each problem.
    Doctor,
}

/// Flags for cluster, namespace and output, as in kubectl.
#[derive(Debug, Args)]
struct KubectlScopeArgs {
    /// Client configuration. Default: KUBECONFIG, ~/.kube/config, or the pod's service account
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Context of the client configuration. Default: the current context
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,

    /// Namespace of the groups. Default: the context's namespace
    #[arg(long, short, global = true, value_name = "NAME")]
    namespace: Option<String>,

    /// Output format
    ///
    /// JSON and YAML contain everything that the text output shows
    #[arg(long, short, global = true, value_enum, value_name = "FORMAT", default_value = "text")]
    output: KubectlOutputFormat,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum KubectlOutputFormat {
    Text,
    Json,
    Yaml,
}

/// State shared by the subcommands.
struct KubectlSession {
    cluster: ClusterClient,
    format: OutputFormat,
}

/// Rewrites the arguments to those of `moongate kubectl`, if the binary runs as a plugin.
pub(crate) fn arguments(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let program = args.first().and_then(|name| Path::new(name).file_stem());
    // kubectl looks up plugins in PATH, where `_` may stand for `-`.
    if program.is_some_and(|name| name.to_string_lossy().replace('_', "-") == PLUGIN) {
        args.splice(..1, ["moongate".into(), "kubectl".into()]);
    }
    args
}

/// Runs the subcommand. The exit code is 1 on failure.
pub(crate) async fn run(command: KubectlArgs) -> anyhow::Result<ExitCode> {
    let scope = command.scope;
    let format = match scope.output {
        KubectlOutputFormat::Text => OutputFormat::Text,
        KubectlOutputFormat::Json => OutputFormat::Json,
        KubectlOutputFormat::Yaml => OutputFormat::Yaml,
    };
    let scope = KubeContextOptions {
        kubeconfig: scope.kubeconfig,
        context: scope.context,
        namespace: scope.namespace,
    };
    let session = KubectlSession { cluster: ClusterClient::connect(scope).await?, format };
    match command.command {
        KubectlSubcommand::Status(command) => command.run(&session).await?,
        KubectlSubcommand::Plan(command) => command.run(&session).await?,
        KubectlSubcommand::Upgrade(command) => command.run(&session).await?,
        KubectlSubcommand::Rollout { command } => command.run(&session).await?,
        KubectlSubcommand::Doctor => return doctor::run(&session).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints to standard output.
fn print(text: &str) -> anyhow::Result<()> {
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Prints a note to standard error, apart from the result.
fn print_note(text: &str) -> anyhow::Result<()> {
    Ok(writeln!(std::io::stderr(), "{text}")?)
}

/// The RoleBasedGroupSet that controls the group and would revert a change of it.
fn owning_set(group: &Value) -> Option<String> {
    let label = &group["metadata"]["labels"][moongate_operator::kubectl::GROUPSET_NAME];
    label.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_runs_as_a_plugin_under_the_plugin_name() {
        let as_called = |words: &[&str]| arguments(words.iter().map(OsString::from));
        assert_eq!(as_called(&["/bin/kubectl-moongate", "status"]), ["moongate", "kubectl", "status"]);
        assert_eq!(as_called(&["kubectl_moongate"])[1..], ["kubectl"]);
        assert_eq!(as_called(&["moongate", "status"])[1..], ["status"]);
    }
}
