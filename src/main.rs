//! The binary with all commands: `moongate gateway | epp | config | operator | planner | kubectl | master | store | store-holder | kv | up | sidecar | loadtest | doctor | explain`.

mod config_check;
mod doctor;
mod epp;
mod explain;
mod gateway;
mod kubectl;
mod kv;
mod master;
mod operator;
mod output;
mod planner;
mod settings;
mod sidecar;
mod store;
mod store_holder;
mod store_router;
mod up;

use std::future::Future;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use moongate_loadtest::LoadtestCommand;
use moongate_runtime::{Supervisor, config, return_freed_memory, terminated};
use moongate_telemetry::{LoggingArgs, init_logs};
use tokio::runtime::{Builder, Runtime};

/// mimalloc returns the freed memory of large bodies to the system sooner, and forwarding them takes less time than with the
/// system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// KV-cache-aware LLM gateway, Mooncake-compatible KV store and Kubernetes operator.
#[derive(Debug, Parser)]
#[command(name = "moongate", version, propagate_version = true)]
struct MoongateArgs {
    #[command(subcommand)]
    command: MoongateSubcommand,
}

#[derive(Debug, Subcommand)]
enum MoongateSubcommand {
    /// Serve the OpenAI API and route requests to SGLang and vLLM engines.
    Gateway(Box<gateway::GatewayArgs>),
    /// Pick engines for requests that another proxy sends, such as Envoy: an endpoint picker of the Gateway API Inference Extension.
    Epp(Box<epp::EppArgs>),
    /// Reconcile RoleBasedGroups on Kubernetes, in place of RBG's own controller manager.
    Operator(Box<operator::OperatorArgs>),
    /// Scale the prefill and decode engines of deployments on Kubernetes to what their latency targets need.
    Planner(Box<planner::PlannerArgs>),
    /// Show, plan, upgrade and roll back RoleBasedGroups. When the binary is named `kubectl-moongate`, only this command exists.
    Kubectl(Box<kubectl::KubectlArgs>),
    /// Serve the metadata of a Mooncake store, in place of Mooncake's own master.
    Master(master::MasterArgs),
    /// Release the lease of a leading master that has died. Started by the master itself.
    #[command(hide = true)]
    MasterExitWatcher(master::MasterArgs),
    /// Run a storage node of a Mooncake store, in place of Mooncake's own store service.
    Store(store::StoreNodeArgs),
    /// Serve a store with several masters under one address.
    StoreRouter(store_router::StoreRouterArgs),
    /// Put, get and list objects of a store, and measure its throughput.
    Kv(Box<kv::KvArgs>),
    /// Hold a store node's memory while the node is restarted or replaced.
    StoreHolder(store_holder::StoreHolderArgs),
    /// Run next to an engine: register it with gateways, drain it, load its LoRA adapters.
    Sidecar(Box<sidecar::SidecarArgs>),
    /// Start simulated engines, a store and a gateway on this machine.
    Up(up::UpArgs),
    /// Check a gateway's settings and engines, and print a fix for each problem.
    Doctor(Box<doctor::DoctorArgs>),
    /// Check settings without starting anything.
    Config {
        /// Subcommand for the settings.
        #[command(subcommand)]
        tool: config_check::ConfigSubcommand,
    },
    /// Show the terms behind a routing decision, and what another policy would have decided.
    Explain(explain::ExplainArgs),
    /// Simulate engines, generate load, replay traces.
    Loadtest {
        /// Subcommand of the load test.
        #[command(subcommand)]
        tool: LoadtestCommand,
        /// Logging of the load test.
        #[command(flatten)]
        logs: LoggingArgs,
    },
}

fn main() -> ExitCode {
    let cli: MoongateArgs = match config::parse(kubectl::arguments(std::env::args_os())) {
        Ok(cli) => cli,
        Err(error) => return error.report(),
    };
    match cli.command {
        MoongateSubcommand::Gateway(command) => {
            let logs = command.logs.clone();
            disable_huge_pages();
            run(&logs, |supervisor| gateway::run(*command, supervisor))
        }
        MoongateSubcommand::Epp(command) => {
            let logs = command.logs.clone();
            disable_huge_pages();
            run(&logs, |supervisor| epp::run(*command, supervisor))
        }
        MoongateSubcommand::Operator(command) => {
            let logs = command.logs.clone();
            disable_huge_pages();
            // One thread: the operator mostly waits for the API server, and the allocator caches freed memory per thread.
            run_on(Builder::new_current_thread(), &logs, |supervisor| operator::run(*command, supervisor))
        }
        MoongateSubcommand::Planner(command) => {
            let logs = command.logs.clone();
            disable_huge_pages();
            // One thread, as the operator: the planner mostly waits for gateways and the API server.
            run_on(Builder::new_current_thread(), &logs, |supervisor| planner::run(*command, supervisor))
        }
        MoongateSubcommand::Kubectl(command) => run(&kubectl::logs(), |_| kubectl::run(*command)),
        MoongateSubcommand::Master(command) => match command.options() {
            Ok(options) => {
                let logs = options.logs.clone();
                run(&logs, |supervisor| master::run(options, command, supervisor))
            }
            Err(code) => code,
        },
        MoongateSubcommand::MasterExitWatcher(command) => match command.options() {
            Ok(options) => {
                let logs = options.logs.clone();
                run_on(Builder::new_current_thread(), &logs, |_| master::watch_exit(options))
            }
            Err(code) => code,
        },
        MoongateSubcommand::Store(command) => match command.settings() {
            Ok((flags, config)) => {
                let logs = flags.logs.clone();
                store::disable_huge_pages(&flags);
                run(&logs, |supervisor| store::run(flags, config, supervisor))
            }
            Err(code) => code,
        },
        MoongateSubcommand::StoreRouter(command) => {
            let logs = command.logs.clone();
            run(&logs, |supervisor| store_router::run(command, supervisor))
        }
        MoongateSubcommand::Kv(command) => {
            let logs = command.logs.clone();
            run(&logs, |supervisor| kv::run(*command, supervisor))
        }
        MoongateSubcommand::StoreHolder(command) => {
            let logs = command.logs.clone();
            run(&logs, |_| store_holder::run(command))
        }
        MoongateSubcommand::Up(command) => {
            let logs = command.logs.clone();
            run(&logs, |supervisor| up::run(command, supervisor))
        }
        MoongateSubcommand::Sidecar(command) => {
            let logs = command.logs.clone();
            disable_huge_pages();
            run(&logs, |supervisor| sidecar::run(*command, supervisor))
        }
        MoongateSubcommand::Doctor(command) => {
            let logs = command.logs.clone();
            run(&logs, |supervisor| doctor::run(*command, supervisor))
        }
        MoongateSubcommand::Config { tool: config_check::ConfigSubcommand::Check(command) } => {
            let logs = command.logs.clone();
            run(&logs, |_| config_check::check(*command))
        }
        MoongateSubcommand::Explain(command) => {
            let logs = command.logs.clone();
            run(&logs, |_| explain::run(command))
        }
        MoongateSubcommand::Loadtest { tool, logs } => run(&logs, |supervisor| async move {
            let stop = supervisor.token();
            supervisor.spawn("signals", async move {
                terminated().await;
                stop.cancel();
            });
            moongate_loadtest::run(tool, &supervisor).await
        }),
    }
}

/// Disables transparent huge pages: most of a small heap on pages of 2 MiB would be unused.
fn disable_huge_pages() {
    // A failure only increases memory use.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
}

/// Runs a command on all cores. A failure, or the panic of an essential task, is printed as one line, with exit code 1.
fn run<F>(logs: &LoggingArgs, command: impl FnOnce(Supervisor) -> F) -> ExitCode
where
    F: Future<Output = anyhow::Result<ExitCode>>,
{
    run_on(Builder::new_multi_thread(), logs, command)
}

fn run_on<F>(runtime: Builder, logs: &LoggingArgs, command: impl FnOnce(Supervisor) -> F) -> ExitCode
where
    F: Future<Output = anyhow::Result<ExitCode>>,
{
    let outcome = start(runtime, logs).and_then(|runtime| {
        let supervisor = Supervisor::new();
        runtime.spawn(return_freed_memory());
        let outcome = runtime.block_on(async {
            tokio::select! {
                outcome = command(supervisor.clone()) => outcome,
                task = supervisor.failed() => {
                    Err(anyhow::anyhow!("the essential task `{task}` panicked; the log has the panic message"))
                }
            }
        });
        runtime.shutdown_background();
        outcome
    });
    outcome.unwrap_or_else(|error| {
        output::print_error(error_chain(&error));
        match error.is::<settings::InvalidSettingsError>() {
            true => ExitCode::from(settings::INVALID_SETTINGS),
            false => ExitCode::FAILURE,
        }
    })
}

fn start(mut runtime: Builder, logs: &LoggingArgs) -> anyhow::Result<Runtime> {
    init_logs(logs)?;
    settings::warn_of_unknown_variables();
    Ok(runtime.enable_all().build()?)
}

/// An error with its causes. Some errors include their cause in their own message; such a cause is not repeated.
fn error_chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match () {
        () if text.is_empty() => cause,
        () if text.contains(&cause) => text,
        () => format!("{text}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_printed_once() {
        let error = anyhow::anyhow!("no route").context("a peer: no route").context("store");
        assert_eq!(error_chain(&error), "store: a peer: no route");
    }
}
