//! A real gateway with simulated engines on a faster clock, compared with the simulator of the same fleet and load.
//!
//! | part | subject |
//! |---|---|
//! | `args` | arguments and experiment |
//! | `testbed` | engines, their store, and a gateway in a process of its own |
//! | `store` | a real store: a master and a node |
//! | `process` | starts these programs |
//! | `replay` | the load |
//! | `table` | results |

mod args;
mod process;
mod replay;
mod store;
mod table;
mod testbed;

pub use self::args::LiveComparisonArgs;
pub use self::store::LiveStoreVariant;
pub use self::table::{PolicyComparison, disagreements};

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use moongate_runtime::Supervisor;

use self::testbed::LiveTestbed;
use crate::simulate::{SimulatedWorkload, run_experiment};

/// Maximum share of failed requests in a valid run.
const MAX_FAILED_SHARE: f64 = 0.01;

/// Runs the load in the simulator and then, once per policy, through a real gateway. Returns the table, and whether the
/// order of policies is the same.
///
/// # Errors
/// A setting is out of range, the trace cannot be read, a gateway does not start, or the run was stopped.
pub async fn live(args: &LiveComparisonArgs, supervisor: &Supervisor) -> anyhow::Result<(String, bool)> {
    let mut rows = Vec::new();
    if args.store.is_empty() {
        rows = with_store(args, None, supervisor).await?;
    }
    for variant in &args.store {
        rows.extend(with_store(args, Some(*variant), supervisor).await?);
    }
    let reversed = disagreements(&rows, args.margin);
    Ok((table::text(&rows, args.time_scale, &reversed), reversed.is_empty()))
}

/// Runs the load with every policy and one store, in the simulator and through a gateway.
async fn with_store(
    args: &LiveComparisonArgs,
    store: Option<LiveStoreVariant>,
    supervisor: &Supervisor,
) -> anyhow::Result<Vec<PolicyComparison>> {
    let case = args.experiment(store)?;
    let workload = Arc::new(args.workload(&case));
    let simulated =
        tokio::task::spawn_blocking(move || run_experiment(&case, &AtomicBool::new(false))).await?;
    let mut rows = Vec::with_capacity(simulated.len());
    for standing in &simulated {
        let policy = standing.variant.name.as_str();
        let name = store.map_or_else(|| policy.to_owned(), |store| format!("{policy}, {store}"));
        let live = run_policy(args, policy, store, &workload, supervisor)
            .await
            .with_context(|| format!("policy {name}"))?;
        let lost = live.summary.failed + live.summary.rejected;
        anyhow::ensure!(
            lost < MAX_FAILED_SHARE,
            "policy {name}: {:.1} % of the requests failed",
            100.0 * lost
        );
        tracing::info!(
            policy = name,
            simulated = standing.summary.ttft_mean_s,
            live = live.summary.ttft_mean_s,
            "mean TTFT"
        );
        rows.push(PolicyComparison {
            policy: name,
            simulated: standing.summary,
            live: live.summary,
            lateness: live.lateness,
        });
    }
    Ok(rows)
}

/// Runs the load with one policy through a gateway.
async fn run_policy(
    args: &LiveComparisonArgs,
    policy: &str,
    store: Option<LiveStoreVariant>,
    workload: &Arc<SimulatedWorkload>,
    supervisor: &Supervisor,
) -> anyhow::Result<replay::LiveRunResult> {
    let testbed = LiveTestbed::start(args, policy, store, workload.block_tokens as usize, supervisor).await?;
    let stop = supervisor.token();
    let hints = store.map_or(0.0, |store| store.return_hints);
    let played = replay::replay_workload(&testbed, args, workload, hints, supervisor);
    let played = tokio::select! {
        played = played => played?,
        () = stop.cancelled() => anyhow::bail!("stopped"),
    };
    testbed.stop().await;
    Ok(played)
}
