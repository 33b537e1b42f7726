//! `moongate kubectl plan` and `moongate kubectl upgrade`

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
    /// The group. Without --image: what is still to be done about it
    #[arg(value_name = "GROUP", required_unless_present = "filename", conflicts_with = "filename")]
    group: Option<String>,

    /// Manifests with groups, as `kubectl apply` would get them; `-` is the standard input. Repeatable
    #[arg(long, short, value_name = "FILE")]
    filename: Vec<PathBuf>,

    /// A new image: [ROLE[/CONTAINER]=]IMAGE. Without a role: wherever another tag of the same repository runs. Repeatable
    #[arg(long, value_name = "IMAGE", conflicts_with = "filename")]
    image: Vec<ImageAssignment>,
}

impl KubectlPlanArgs {
    pub(super) async fn run(self, session: &KubectlSession) -> anyhow::Result<()> {
        let mut plans = Vec::new();
        match &self.group {
            Some(group) => plans.push(plan_images(&session.cluster, group, &self.image).await?),
            None => {
                let (objects, left_out) = read_files(&self.filename)?;
                let is_group = |object: &&Value| object["kind"] == "RoleBasedGroup";
                for group in objects.iter().filter(is_group) {
                    plans.push(plan_file(&session.cluster, group, &objects).await?);
                }
                for other in left_out {
                    print_note(&format!("{other} is left out: plans are made for RoleBasedGroups"))?;
                }
                if plans.is_empty() {
                    bail!("there is no RoleBasedGroup in what was given");
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
    /// The group
    #[arg(value_name = "GROUP")]
    group: String,

    /// A new image: [ROLE[/CONTAINER]=]IMAGE. Without a role: wherever another tag of the same repository runs. Repeatable
    #[arg(long, value_name = "IMAGE", required = true)]
    image: Vec<ImageAssignment>,

    #[command(flatten)]
    mode: ChangeModeArgs,
}

/// How a change is made.
#[derive(Debug, Default, Args)]
pub(super) struct ChangeModeArgs {
    /// Only tell what would be done, as `plan` does
    #[arg(long)]
    dry_run: bool,

    /// Wait until all pods are as the change wants them, and tell how far it is
    #[arg(long)]
    wait: bool,

    /// Seconds to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    timeout: u64,
}

impl KubectlUpgradeArgs {
    pub(super) async fn run(self, session: &KubectlSession) -> anyhow::Result<()> {
        self.mode.change(session, &self.group, "upgraded", |group| set_images(group, &self.image)).await
    }
}

impl ChangeModeArgs {
    /// Makes a change of a group, or tells what it would do; and waits, if that is asked for.
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
            let planned = plan(cluster, name, &[], |_| Ok(wanted)).await?;
            return print(&session.format.print(&planned, || planned.text())?);
        }
        let before = cluster.group(name).await?;
        if let Some(set) = owning_set(&before) {
            return Err(KubectlError::OfSet(set).into());
        }
        let after = cluster.edit(name, change).await?;
        let generation = |group: &Value| group["metadata"]["generation"].as_i64();
        match generation(&before) == generation(&after) {
            true => print_note(&format!("{name} is so already"))?,
            false => print_note(&format!("{name} is {done}"))?,
        }
        if self.wait {
            wait_for_rollout(session, name, self.timeout).await?;
        }
        Ok(())
    }
}

/// Tells how far a group is until all is done.
pub(super) async fn wait_for_rollout(
    session: &KubectlSession,
    name: &str,
    seconds: u64,
) -> anyhow::Result<()> {
    let limit = Duration::from_secs(seconds);
    wait(&session.cluster, name, limit, |lines| {
        // A closed terminal leaves nobody to tell.
        let _ = print_note(&lines.join("; "));
    })
    .await?;
    print(&format!("{name} is as its spec says\n"))
}
