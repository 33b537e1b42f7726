//! The command `moongate operator`.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use moongate_operator::controllers::OperatorError;
use moongate_operator::{GangScheduler, OperatorOptions, SizeLimits, admin, webhooks};
use moongate_runtime::{Supervisor, bind, terminated};
use moongate_telemetry::{LoggingArgs, TelemetryArgs, Tracer};

use crate::settings::{invalid_settings, start_error};

/// Grace period for writes in progress at shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// Timeout for exporting the last spans at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Flags of `moongate operator`.
#[derive(Debug, Args)]
pub(crate) struct OperatorArgs {
    /// Client configuration. Default: the pod's service account, or the user's default configuration
    #[arg(long, value_name = "FILE", env = "MOONGATE_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,

    /// Watch only this namespace. Default: all namespaces
    #[arg(long, value_name = "NAMESPACE", env = "MOONGATE_NAMESPACE")]
    namespace: Option<String>,

    /// Number of objects to reconcile concurrently
    #[arg(long, value_name = "NUMBER", env = "MOONGATE_MAX_CONCURRENT_RECONCILES", default_value_t = 10)]
    max_concurrent_reconciles: usize,

    /// Elect a leader through the Lease `rbg-controller`
    #[arg(long, env = "MOONGATE_LEADER_ELECT")]
    leader_elect: bool,

    /// Namespace of the operator's Lease, and of the webhooks' Service and Secret
    #[arg(long, value_name = "NAMESPACE", env = "POD_NAMESPACE", default_value = "default")]
    own_namespace: String,

    /// Listen address of `/healthz`, `/readyz` and `/metrics`
    #[arg(long, value_name = "ADDRESS", env = "MOONGATE_ADMIN_LISTEN", default_value = "0.0.0.0:8082")]
    admin_listen: SocketAddr,

    /// Scheduler for groups with gang scheduling
    #[arg(
        long,
        value_enum,
        value_name = "NAME",
        env = "MOONGATE_SCHEDULER_NAME",
        default_value = "scheduler-plugins"
    )]
    scheduler_name: GangSchedulerArg,

    #[command(flatten)]
    limits: SizeLimitArgs,

    #[command(flatten)]
    ports: PortAllocatorArgs,

    #[command(flatten)]
    webhooks: WebhookArgs,

    #[command(flatten)]
    telemetry: TelemetryArgs,

    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum GangSchedulerArg {
    SchedulerPlugins,
    Volcano,
}

impl From<GangSchedulerArg> for GangScheduler {
    fn from(scheduler: GangSchedulerArg) -> Self {
        match scheduler {
            GangSchedulerArg::SchedulerPlugins => Self::SchedulerPlugins,
            GangSchedulerArg::Volcano => Self::Volcano,
        }
    }
}

#[derive(Debug, Args)]
struct SizeLimitArgs {
    /// Maximum number of pods of a group. Larger groups are rejected and not reconciled
    #[arg(
        long,
        value_name = "NUMBER",
        env = "MOONGATE_MAX_PODS_PER_GROUP",
        default_value_t = SizeLimits::DEFAULT_PODS_PER_GROUP
    )]
    max_pods_per_group: u32,

    /// Maximum number of pods of one instance, such as a leader with its workers
    #[arg(
        long,
        value_name = "NUMBER",
        env = "MOONGATE_MAX_PODS_PER_INSTANCE",
        default_value_t = SizeLimits::DEFAULT_PODS_PER_INSTANCE
    )]
    max_pods_per_instance: u32,

    /// Maximum number of groups of a RoleBasedGroupSet
    #[arg(
        long,
        value_name = "NUMBER",
        env = "MOONGATE_MAX_GROUPS_PER_SET",
        default_value_t = SizeLimits::DEFAULT_GROUPS_PER_SET
    )]
    max_groups_per_set: u32,
}

impl From<SizeLimitArgs> for SizeLimits {
    fn from(args: SizeLimitArgs) -> Self {
        Self {
            pods_per_group: args.max_pods_per_group,
            pods_per_instance: args.max_pods_per_instance,
            groups_per_set: args.max_groups_per_set,
        }
    }
}

#[derive(Debug, Args)]
struct PortAllocatorArgs {
    /// Allocate ports for pods that request them
    #[arg(long, env = "MOONGATE_ENABLE_PORT_ALLOCATOR")]
    enable_port_allocator: bool,

    /// First port of the range to allocate from
    #[arg(long, value_name = "PORT", env = "MOONGATE_START_PORT", default_value_t = 30000)]
    start_port: u16,

    /// Number of ports in the range
    #[arg(long, value_name = "NUMBER", env = "MOONGATE_PORT_RANGE", default_value_t = 5000)]
    port_range: u16,
}

impl PortAllocatorArgs {
    fn range(&self) -> anyhow::Result<Option<Range<u16>>> {
        let Some(end) = self.start_port.checked_add(self.port_range) else {
            anyhow::bail!("--start-port and --port-range go beyond port 65535; lower one of them");
        };
        Ok(self.enable_port_allocator.then_some(self.start_port..end))
    }
}

#[derive(Debug, Args)]
struct WebhookArgs {
    /// Service through which the API server calls the webhooks for conversion and validation. Without it, webhooks are off
    #[arg(long, value_name = "NAME", env = "MOONGATE_WEBHOOK_SERVICE")]
    webhook_service: Option<String>,

    /// Port of the webhooks' Service
    #[arg(long, value_name = "PORT", env = "MOONGATE_WEBHOOK_SERVICE_PORT", default_value_t = 443)]
    webhook_service_port: u16,

    /// Listen address of the webhooks
    #[arg(long, value_name = "ADDRESS", env = "MOONGATE_WEBHOOK_LISTEN", default_value = "0.0.0.0:9443")]
    webhook_listen: SocketAddr,

    /// Secret that stores the webhooks' certificate
    #[arg(long, value_name = "NAME", env = "MOONGATE_WEBHOOK_SECRET", default_value = "moongate-webhooks")]
    webhook_secret: String,
}

impl WebhookArgs {
    async fn start(
        self,
        operator: &mut OperatorOptions,
        namespace: &str,
        supervisor: &Supervisor,
    ) -> anyhow::Result<()> {
        let Some(service) = self.webhook_service else { return Ok(()) };
        let options = webhooks::WebhookOptions {
            namespace: namespace.to_owned(),
            service,
            port: self.webhook_service_port,
            secret: self.webhook_secret,
            size_limits: operator.size_limits,
            gang_scheduler: operator.gang_scheduler,
            ownership: webhooks::OwnershipTiming::default(),
        };
        let connect =
            moongate_operator::client(operator.kubeconfig.as_deref(), operator.limits, &operator.metrics);
        let client = connect.await.map_err(operator_error)?;
        let metrics = Arc::clone(&operator.metrics);
        let owner = webhooks::start(bind(self.webhook_listen)?, client, options, metrics, supervisor)?;
        operator.webhook_owner = Some(owner);
        Ok(())
    }
}

fn operator_error(error: OperatorError) -> anyhow::Error {
    let is_invalid = matches!(error, OperatorError::Client(_));
    start_error(error, is_invalid)
}

/// Runs the operator until it is terminated or loses leadership.
pub(crate) async fn run(command: OperatorArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let traces = Tracer::start(&command.telemetry, "moongate-operator").map_err(invalid_settings)?;
    let mut options = OperatorOptions {
        kubeconfig: command.kubeconfig,
        namespace: command.namespace,
        workers: command.max_concurrent_reconciles,
        gang_scheduler: command.scheduler_name.into(),
        size_limits: command.limits.into(),
        ports: command.ports.range().map_err(invalid_settings)?,
        lease: command.leader_elect.then(|| (command.own_namespace.clone(), "rbg-controller".to_owned())),
        traces: traces.clone(),
        ..OperatorOptions::default()
    };
    admin::start(bind(command.admin_listen)?, Arc::clone(&options.metrics), &supervisor);
    command.webhooks.start(&mut options, &command.own_namespace, &supervisor).await?;
    let stop = supervisor.token();
    let mut running = std::pin::pin!(moongate_operator::run(options, &supervisor));
    tokio::select! {
        result = &mut running => result.map_err(operator_error)?,
        () = terminated() => {
            stop.cancel();
            running.await?;
        }
    }
    if let Err(stuck) = supervisor.shutdown(SHUTDOWN_GRACE).await {
        tracing::warn!("{stuck}");
    }
    if let Err(lost) = traces.shutdown(FLUSH_TIMEOUT).await {
        tracing::warn!(%lost, "spans were lost");
    }
    Ok(ExitCode::SUCCESS)
}
