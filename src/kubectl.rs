//! `moongate kubectl`, which is `kubectl moongate` when the binary is called `kubectl-moongate`: look at groups, ask what a
//! change would do, make it, take it back.

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

/// What the binary is called as a plugin of kubectl.
const PLUGIN: &str = "kubectl-moongate";

/// What fails is told once, by the command: the client's own line says less.
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
    /// Tell how groups are, and what they wait for.
    Status(status::KubectlStatusArgs),
    /// Tell which pods a change would restart, in which order, and why. Changes nothing.
    Plan(change::KubectlPlanArgs),
    /// Give containers new images.
    Upgrade(change::KubectlUpgradeArgs),
    /// Revisions and updates of a group.
    Rollout {
        #[command(subcommand)]
        command: rollout::RolloutSubcommand,
    },
    /// Check whether the cluster has what groups need, and say how to mend what is wrong.
    Doctor,
}

/// Which cluster, and where in it. As kubectl has them.
#[derive(Debug, Args)]
struct KubectlScopeArgs {
    /// Client configuration. Without it KUBECONFIG, ~/.kube/config, or the pod's service account
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Context of the client configuration. Without it the current one
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,

    /// Namespace of the groups. Without it that of the context
    #[arg(long, short, global = true, value_name = "NAME")]
    namespace: Option<String>,

    /// How to print
    ///
    /// Programs get as JSON or YAML all that people get as text
    #[arg(long, short, global = true, value_enum, value_name = "FORMAT", default_value = "text")]
    output: KubectlOutputFormat,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum KubectlOutputFormat {
    Text,
    Json,
    Yaml,
}

/// What the tools of this command share.
struct KubectlSession {
    cluster: ClusterClient,
    format: OutputFormat,
}

/// The arguments as `moongate kubectl` has them, if the binary is called as a plugin.
pub(crate) fn arguments(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let called = args.first().and_then(|name| Path::new(name).file_stem());
    // kubectl calls what it finds in PATH, where `-` may stand as `_`.
    if called.is_some_and(|name| name.to_string_lossy().replace('_', "-") == PLUGIN) {
        args.splice(..1, ["moongate".into(), "kubectl".into()]);
    }
    args
}

/// Does what is asked. The exit code is 1 where that fails.
pub(crate) async fn run(command: KubectlArgs) -> anyhow::Result<ExitCode> {
    let place = command.scope;
    let format = match place.output {
        KubectlOutputFormat::Text => OutputFormat::Text,
        KubectlOutputFormat::Json => OutputFormat::Json,
        KubectlOutputFormat::Yaml => OutputFormat::Yaml,
    };
    let place = KubeContextOptions {
        kubeconfig: place.kubeconfig,
        context: place.context,
        namespace: place.namespace,
    };
    let session = KubectlSession { cluster: ClusterClient::connect(place).await?, format };
    match command.command {
        KubectlSubcommand::Status(command) => command.run(&session).await?,
        KubectlSubcommand::Plan(command) => command.run(&session).await?,
        KubectlSubcommand::Upgrade(command) => command.run(&session).await?,
        KubectlSubcommand::Rollout { command } => command.run(&session).await?,
        KubectlSubcommand::Doctor => return doctor::run(&session).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// To standard output.
fn print(text: &str) -> anyhow::Result<()> {
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// To standard error: what is not the answer.
fn print_note(text: &str) -> anyhow::Result<()> {
    Ok(writeln!(std::io::stderr(), "{text}")?)
}

/// The set that a group belongs to. Who changes the group has the change taken back.
fn owning_set(group: &Value) -> Option<String> {
    let label = &group["metadata"]["labels"][moongate_operator::kubectl::GROUPSET_NAME];
    label.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_is_a_plugin_when_it_is_called_as_one() {
        let as_called = |words: &[&str]| arguments(words.iter().map(OsString::from));
        assert_eq!(as_called(&["/bin/kubectl-moongate", "status"]), ["moongate", "kubectl", "status"]);
        assert_eq!(as_called(&["kubectl_moongate"])[1..], ["kubectl"]);
        assert_eq!(as_called(&["moongate", "status"])[1..], ["status"]);
    }
}
