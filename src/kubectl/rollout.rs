//! `moongate kubectl rollout`

use clap::{Args, Subcommand};
use moongate_operator::kubectl::{Difference, History, KubectlError, paused, restarted, table, undone};
use serde_json::Value;

use super::change::{HowFlags, follow};
use super::{Session, print};

#[derive(Debug, Subcommand)]
pub(super) enum RolloutCommand {
    /// List a group's revisions
    History(HistoryCommand),
    /// Tell how a revision differs from what the group is now
    Diff(RevisionCommand),
    /// Go back to an earlier revision
    Undo(UndoCommand),
    /// Hold updates of a group's roles back
    Pause(PauseCommand),
    /// Let them go on
    Resume(RolesCommand),
    /// Wait until all pods are as the spec says
    Status(StatusCommand),
    /// Make all pods anew, as far at a time as an update may go
    Restart(RolesCommand),
}

/// Flags of `moongate kubectl rollout history`.
#[derive(Debug, Args)]
pub(super) struct HistoryCommand {
    /// The group
    #[arg(value_name = "GROUP")]
    group: String,

    /// Print all that this revision keeps
    #[arg(long, value_name = "NUMBER")]
    revision: Option<i64>,
}

/// Flags of `moongate kubectl rollout diff`.
#[derive(Debug, Args)]
pub(super) struct RevisionCommand {
    /// The group
    #[arg(value_name = "GROUP")]
    group: String,

    /// The revision. Without: the newest by which pods were others than now
    #[arg(long, value_name = "NUMBER")]
    revision: Option<i64>,
}

/// Flags of `moongate kubectl rollout undo`.
#[derive(Debug, Args)]
pub(super) struct UndoCommand {
    /// The group
    #[arg(value_name = "GROUP")]
    group: String,

    /// The revision. Without: the newest by which pods were others than now
    #[arg(long, visible_alias = "revision", value_name = "NUMBER")]
    to_revision: Option<i64>,

    #[command(flatten)]
    how: HowFlags,
}

/// Flags of `moongate kubectl rollout pause`.
#[derive(Debug, Args)]
pub(super) struct PauseCommand {
    /// The group
    #[arg(value_name = "GROUP")]
    group: String,

    /// A role. Without: all. Repeatable
    #[arg(long, value_name = "NAME")]
    role: Vec<String>,
}

/// Flags of `moongate kubectl rollout resume` and `restart`.
#[derive(Debug, Args)]
pub(super) struct RolesCommand {
    /// The group
    #[arg(value_name = "GROUP")]
    group: String,

    /// A role. Without: all. Repeatable
    #[arg(long, value_name = "NAME")]
    role: Vec<String>,

    #[command(flatten)]
    how: HowFlags,
}

/// Flags of `moongate kubectl rollout status`.
#[derive(Debug, Args)]
pub(super) struct StatusCommand {
    /// The group
    #[arg(value_name = "GROUP")]
    group: String,

    /// Seconds to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    timeout: u64,
}

impl RolloutCommand {
    pub(super) async fn run(self, session: &Session) -> anyhow::Result<()> {
        match self {
            Self::History(command) => command.run(session).await,
            Self::Diff(command) => command.run(session).await,
            Self::Undo(command) => command.run(session).await,
            Self::Pause(command) => {
                let change = |group: &mut Value| paused(group, &command.role, true);
                HowFlags::default().change(session, &command.group, "paused", change).await
            }
            Self::Resume(command) => {
                let change = |group: &mut Value| paused(group, &command.role, false);
                command.how.change(session, &command.group, "resumed", change).await
            }
            Self::Restart(command) => {
                let now = moongate_operator::kubectl::now();
                let change = |group: &mut Value| restarted(group, &command.role, &now);
                command.how.change(session, &command.group, "restarted", change).await
            }
            Self::Status(command) => follow(session, &command.group, command.timeout).await,
        }
    }
}

async fn history(session: &Session, name: &str) -> Result<(Value, History), KubectlError> {
    let group = session.cluster.group(name).await?;
    let history = History::of(&group, &session.cluster.family(name).await?)?;
    Ok((group, history))
}

impl HistoryCommand {
    async fn run(self, session: &Session) -> anyhow::Result<()> {
        let (_, history) = history(session, &self.group).await?;
        if let Some(number) = self.revision {
            let data = &history.revision(number)?.data;
            let text = || serde_json::to_string_pretty(&data["spec"]).unwrap_or_default() + "\n";
            return print(&session.format.print(data, text)?);
        }
        let rows = history.revisions.iter().map(|revision| {
            let mark = if revision.is_current { " (now)" } else { "" };
            let changes = revision.changes.join("; ");
            vec![format!("{}{mark}", revision.number), revision.made.clone(), changes]
        });
        let rows: Vec<Vec<String>> = rows.collect();
        let text = || table(&["REVISION", "MADE", "CHANGES"], &rows);
        print(&session.format.print(&history, text)?)
    }
}

impl RevisionCommand {
    async fn run(self, session: &Session) -> anyhow::Result<()> {
        let (_, history) = history(session, &self.group).await?;
        let revision = match self.revision {
            Some(number) => history.revision(number)?,
            None => history.earlier()?,
        };
        let all = history.differences_to(revision);
        let text = || match all.is_empty() {
            true => format!("revision {} is what {} is now\n", revision.number, self.group),
            false => all.iter().map(Difference::text).collect(),
        };
        print(&session.format.print(&all, text)?)
    }
}

impl UndoCommand {
    async fn run(self, session: &Session) -> anyhow::Result<()> {
        let (_, history) = history(session, &self.group).await?;
        let revision = match self.to_revision {
            Some(number) => history.revision(number)?,
            None => history.earlier()?,
        };
        let done = format!("taken back to revision {}", revision.number);
        let change = |group: &mut Value| undone(group, &revision.data);
        self.how.change(session, &self.group, &done, change).await
    }
}
