//! The commands `moongate kubectl plan` and `moongate kubectl upgrade`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use moongate_operator::kubectl::{
    ClusterClient, ImageAssignment, KubectlError, PlanReport, apply_file, plan, read_files, set_images, wait,
};
use serde_json::Value;

use super::{KubectlSession, owning_set, print, print_note};

/// Flags of `moongate kubectl plan`.
#[derive(Debug, Args)]
pub(super) struct KubectlPlanArgs {
    /// Name of the group. Without --image: preview pending changes of the group
    #[arg(value_name = "GROUP", required_unless_present = "filename", conflicts_with = "filename")]
    group: Option<String>,

    /// Manifests with groups, as for `kubectl apply`; `-` is standard input. Repeatable
    #[arg(long, short, value_name = "FILE")]
    filename: Vec<PathBuf>,

    /// New image: [ROLE[/CONTAINER]=]IMAGE. Without a role: all containers that run another tag of the same repository.
    /// Repeatable
    #[arg(long, value_name = "IMAGE", conflicts_with = "filename")]
    image: Vec<ImageAssignment>,
}

impl KubectlPlanArgs {
    pub(super) async fn run(self, session: &KubectlSession) -> anyhow::Result<()> {
        let mut plans = Vec::new();
        match &self.group {
            Some(group) => plans.push(plan_images(&session.cluster, group, &self.image).await?),
            None => {
                let (objects, skipped) = read_files(&self.filename)?;
                let is_group = |object: &&Value| object["kind"] == "RoleBasedGroup";
                for group in objects.iter().filter(is_group) {
                    plans.push(plan_file(&session.cluster, group, &objects).await?);
                }
                for other in skipped {
                    print_note(&format!("{other} skipped: only RoleBasedGroups are planned"))?;
                }
                if plans.is_empty() {
                    bail!("no RoleBasedGroup in the given files");
                }
            }
        }
        let texts = || plans.iter().map(PlanReport::text).collect::<Vec<_>>().join("\n");
        print(&session.format.print(&plans, texts)?)
    }
}

async fn plan_file(
    cluster: &ClusterClient,
    group: &Value,
    all: &[Value],
) -> Result<PlanReport, KubectlError> {
    let text = |member: &str| group["metadata"][member].as_str();
    let name = text("name").unwrap_or_default();
    let cluster = cluster.in_namespace(text("namespace").unwrap_or(&cluster.namespace));
    let policies: Vec<Value> =
        all.iter().filter(|object| object["kind"] == "CoordinatedPolicy").cloned().collect();
    plan(&cluster, name, &policies, |live| Ok(apply_file(live, group))).await
}

async fn plan_images(
    cluster: &ClusterClient,
    group: &str,
    images: &[ImageAssignment],
) -> Result<PlanReport, KubectlError> {
    let mut wanted = cluster.group(group).await?;
    set_images(&mut wanted, images)?;
    plan(cluster, group, &[], |_| Ok(wanted)).await
}

/// Flags of `moongate kubectl upgrade`.
#[derive(Debug, Args)]
pub(super) struct KubectlUpgradeArgs {
    /// Name of the group
    #[arg(value_name = "GROUP")]
    group: String,

    /// New image: [ROLE[/CONTAINER]=]IMAGE. Without a role: all containers that run another tag of the same repository.
    /// Repeatable
    #[arg(long, value_name = "IMAGE", required = true)]
    image: Vec<ImageAssignment>,

    #[command(flatten)]
    mode: ChangeModeArgs,
}

/// How a change is carried out.
#[derive(Debug, Default, Args)]
pub(super) struct ChangeModeArgs {
    /// Print the plan only, as `plan` does
    #[arg(long)]
    dry_run: bool,

    /// Wait until the rollout is complete, and print progress
    #[arg(long)]
    wait: bool,

    /// Maximum time to wait, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    timeout: u64,
}

impl KubectlUpgradeArgs {
    pub(super) async fn run(self, session: &KubectlSession) -> anyhow::Result<()> {
        self.mode.change(session, &self.group, "upgraded", |group| set_images(group, &self.image)).await
    }
}

impl ChangeModeArgs {
    /// Applies a change of a group or prints its plan, and waits for the rollout if requested.
    pub(super) async fn change(
        &self,
        session: &KubectlSession,
        name: &str,
        done: &str,
        change: impl Fn(&mut Value) -> Result<(), KubectlError>,
    ) -> anyhow::Result<()> {
        let cluster = &session.cluster;
        if self.dry_run {
            let mut wanted = cluster.group(name).await?;
            change(&mut wanted)?;
            let report = plan(cluster, name, &[], |_| Ok(wanted)).await?;
            return print(&session.format.print(&report, || report.text())?);
        }
        let before = cluster.group(name).await?;
        if let Some(set) = owning_set(&before) {
            return Err(KubectlError::OfSet(set).into());
        }
        let after = cluster.edit(name, change).await?;
        let generation = |group: &Value| group["metadata"]["generation"].as_i64();
        match generation(&before) == generation(&after) {
            true => print_note(&format!("{name} is unchanged"))?,
            false => print_note(&format!("{name} is {done}"))?,
        }
        if self.wait {
            wait_for_rollout(session, name, self.timeout).await?;
        }
        Ok(())
    }
}

/// Prints progress until the rollout is complete.
pub(super) async fn wait_for_rollout(
    session: &KubectlSession,
    name: &str,
    seconds: u64,
) -> anyhow::Result<()> {
    let limit = Duration::from_secs(seconds);
    wait(&session.cluster, name, limit, |lines| {
        // Ignore a closed terminal.
        let _ = print_note(&lines.join("; "));
    })
    .await?;
    print(&format!("{name} is up to date\n"))
}
