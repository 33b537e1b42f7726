//! The real gateway between simulated engines on compressed time, beside the simulator of the same fleet and load.
//!
//! | part | subject |
//! |---|---|
//! | `args` | what is compared |
//! | `world` | engines, their store, and a gateway as a process of its own |
//! | `replay` | the load |
//! | `table` | what came out |

mod args;
mod replay;
mod table;
mod testbed;

pub use self::args::LiveComparisonArgs;
pub use self::table::{PolicyComparison, disagreements};

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use moongate_runtime::Supervisor;

use self::testbed::LiveTestbed;
use crate::simulate::{SimulatedWorkload, run_experiment};

/// Share of the requests that may fail in a run that is to tell anything.
const MAX_FAILED_SHARE: f64 = 0.01;

/// Plays the load through the simulator and then, once for each policy, through a real gateway. Answers what to print, and whether the
/// order is the same.
///
/// # Errors
/// A setting is out of range, the trace cannot be read, a gateway does not start, or the run was stopped.
pub async fn live(args: &LiveComparisonArgs, supervisor: &Supervisor) -> anyhow::Result<(String, bool)> {
    let case = args.experiment()?;
    let workload = Arc::new(args.workload(&case));
    let simulated =
        tokio::task::spawn_blocking(move || run_experiment(&case, &AtomicBool::new(false))).await?;
    let mut rows = Vec::with_capacity(simulated.len());
    for standing in &simulated {
        let policy = standing.variant.name.as_str();
        let live = run_policy(args, policy, &workload, supervisor)
            .await
            .with_context(|| format!("policy {policy}"))?;
        let lost = live.summary.failed + live.summary.rejected;
        anyhow::ensure!(
            lost < MAX_FAILED_SHARE,
            "policy {policy}: {:.1} % of the requests failed",
            100.0 * lost
        );
        tracing::info!(
            policy,
            simulated = standing.summary.ttft_mean_s,
            live = live.summary.ttft_mean_s,
            "mean TTFT"
        );
        rows.push(PolicyComparison {
            policy: policy.to_owned(),
            simulated: standing.summary,
            live: live.summary,
            lateness: live.lateness,
        });
    }
    let apart = disagreements(&rows, args.margin);
    Ok((table::text(&rows, args.time_scale, &apart), apart.is_empty()))
}

/// One policy's run through a gateway.
async fn run_policy(
    args: &LiveComparisonArgs,
    policy: &str,
    workload: &Arc<SimulatedWorkload>,
    supervisor: &Supervisor,
) -> anyhow::Result<replay::LiveRunResult> {
    let world = LiveTestbed::start(args, policy, workload.block_tokens as usize, supervisor).await?;
    let stop = supervisor.token();
    let played = replay::replay_workload(&world, args, workload, supervisor);
    let played = tokio::select! {
        played = played => played?,
        () = stop.cancelled() => anyhow::bail!("stopped"),
    };
    world.stop().await;
    Ok(played)
}
