//! The command `moongate kubectl rollout`.

use clap::{Args, Subcommand};
use moongate_operator::kubectl::{
    FieldDifference, KubectlError, RevisionHistory, restart_pods, restore_revision, set_paused, table,
};
use serde_json::Value;

use super::change::{ChangeModeArgs, wait_for_rollout};
use super::{KubectlSession, print};

#[derive(Debug, Subcommand)]
pub(super) enum RolloutSubcommand {
    /// List the revisions of a group
    History(RolloutHistoryArgs),
    /// Show the differences between a revision and the group's present spec
    Diff(RolloutDiffArgs),
    /// Roll back to an earlier revision
    Undo(RolloutUndoArgs),
    /// Pause updates of a group's roles
    Pause(RolloutPauseArgs),
    /// Resume updates of a group's roles
    Resume(RolloutRolesArgs),
    /// Wait until the rollout is complete
    Status(RolloutStatusArgs),
    /// Recreate all pods within the rolling-update limits
    Restart(RolloutRolesArgs),
}

/// Flags of `moongate kubectl rollout history`.
#[derive(Debug, Args)]
pub(super) struct RolloutHistoryArgs {
    /// Name of the group
    #[arg(value_name = "GROUP")]
    group: String,

    /// Print the whole spec of this revision
    #[arg(long, value_name = "NUMBER")]
    revision: Option<i64>,
}

/// Flags of `moongate kubectl rollout diff`.
#[derive(Debug, Args)]
pub(super) struct RolloutDiffArgs {
    /// Name of the group
    #[arg(value_name = "GROUP")]
    group: String,

    /// Revision. Default: the newest one with other pods than now
    #[arg(long, value_name = "NUMBER")]
    revision: Option<i64>,
}

/// Flags of `moongate kubectl rollout undo`.
#[derive(Debug, Args)]
pub(super) struct RolloutUndoArgs {
    /// Name of the group
    #[arg(value_name = "GROUP")]
    group: String,

    /// Revision. Default: the newest one with other pods than now
    #[arg(long, visible_alias = "revision", value_name = "NUMBER")]
    to_revision: Option<i64>,

    #[command(flatten)]
    mode: ChangeModeArgs,
}

/// Flags of `moongate kubectl rollout pause`.
#[derive(Debug, Args)]
pub(super) struct RolloutPauseArgs {
    /// Name of the group
    #[arg(value_name = "GROUP")]
    group: String,

    /// Name of a role. Default: all roles. Repeatable
    #[arg(long, value_name = "NAME")]
    role: Vec<String>,
}

/// Flags of `moongate kubectl rollout resume` and `restart`.
#[derive(Debug, Args)]
pub(super) struct RolloutRolesArgs {
    /// Name of the group
    #[arg(value_name = "GROUP")]
    group: String,

    /// Name of a role. Default: all roles. Repeatable
    #[arg(long, value_name = "NAME")]
    role: Vec<String>,

    #[command(flatten)]
    mode: ChangeModeArgs,
}

/// Flags of `moongate kubectl rollout status`.
#[derive(Debug, Args)]
pub(super) struct RolloutStatusArgs {
    /// Name of the group
    #[arg(value_name = "GROUP")]
    group: String,

    /// Maximum time to wait, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    timeout: u64,
}

impl RolloutSubcommand {
    pub(super) async fn run(self, session: &KubectlSession) -> anyhow::Result<()> {
        match self {
            Self::History(command) => command.run(session).await,
            Self::Diff(command) => command.run(session).await,
            Self::Undo(command) => command.run(session).await,
            Self::Pause(command) => {
                let change = |group: &mut Value| set_paused(group, &command.role, true);
                ChangeModeArgs::default().change(session, &command.group, "paused", change).await
            }
            Self::Resume(command) => {
                let change = |group: &mut Value| set_paused(group, &command.role, false);
                command.mode.change(session, &command.group, "resumed", change).await
            }
            Self::Restart(command) => {
                let now = moongate_operator::kubectl::now();
                let change = |group: &mut Value| restart_pods(group, &command.role, &now);
                command.mode.change(session, &command.group, "restarted", change).await
            }
            Self::Status(command) => wait_for_rollout(session, &command.group, command.timeout).await,
        }
    }
}

async fn history(session: &KubectlSession, name: &str) -> Result<(Value, RevisionHistory), KubectlError> {
    let group = session.cluster.group(name).await?;
    let history = RevisionHistory::read(&group, &session.cluster.group_snapshot(name).await?)?;
    Ok((group, history))
}

impl RolloutHistoryArgs {
    async fn run(self, session: &KubectlSession) -> anyhow::Result<()> {
        let (_, history) = history(session, &self.group).await?;
        if let Some(number) = self.revision {
            let data = &history.revision(number)?.data;
            let text = || serde_json::to_string_pretty(&data["spec"]).unwrap_or_default() + "\n";
            return print(&session.format.print(data, text)?);
        }
        let rows = history.revisions.iter().map(|revision| {
            let mark = if revision.is_current { " (current)" } else { "" };
            let changes = revision.changes.join("; ");
            vec![format!("{}{mark}", revision.number), revision.created_at.clone(), changes]
        });
        let rows: Vec<Vec<String>> = rows.collect();
        let text = || table(&["REVISION", "CREATED", "CHANGES"], &rows);
        print(&session.format.print(&history, text)?)
    }
}

impl RolloutDiffArgs {
    async fn run(self, session: &KubectlSession) -> anyhow::Result<()> {
        let (_, history) = history(session, &self.group).await?;
        let revision = match self.revision {
            Some(number) => history.revision(number)?,
            None => history.previous()?,
        };
        let all = history.differences_to(revision);
        let text = || match all.is_empty() {
            true => format!("revision {} equals the present spec of {}\n", revision.number, self.group),
            false => all.iter().map(FieldDifference::to_text).collect(),
        };
        print(&session.format.print(&all, text)?)
    }
}

impl RolloutUndoArgs {
    async fn run(self, session: &KubectlSession) -> anyhow::Result<()> {
        let (_, history) = history(session, &self.group).await?;
        let revision = match self.to_revision {
            Some(number) => history.revision(number)?,
            None => history.previous()?,
        };
        let done = format!("rolled back to revision {}", revision.number);
        let change = |group: &mut Value| restore_revision(group, &revision.data);
        self.mode.change(session, &self.group, &done, change).await
    }
}
