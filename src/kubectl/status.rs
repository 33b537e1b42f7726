//! The command `moongate kubectl status`.

use clap::Args;
use moongate_operator::kubectl::{GroupReport, table};

use super::{KubectlSession, print};

/// Flags of `moongate kubectl status`.
#[derive(Debug, Args)]
pub(super) struct KubectlStatusArgs {
    /// Name of the group. Default: all groups, one line each
    #[arg(value_name = "GROUP")]
    group: Option<String>,

    /// Show groups of all namespaces
    #[arg(long, short = 'A', conflicts_with = "group")]
    all_namespaces: bool,
}

impl KubectlStatusArgs {
    pub(super) async fn run(self, session: &KubectlSession) -> anyhow::Result<()> {
        if let Some(name) = &self.group {
            let report = GroupReport::read(&session.cluster, name).await?;
            return print(&session.format.print(&report, || report.text())?);
        }
        let reports = GroupReport::all(&session.cluster, self.all_namespaces).await?;
        let rows: Vec<Vec<String>> = reports.iter().map(GroupReport::row).collect();
        let text = || match rows.is_empty() {
            true if self.all_namespaces => "no RoleBasedGroups found\n".to_owned(),
            true => format!("no RoleBasedGroups in namespace {}\n", session.cluster.namespace),
            false => table(&GroupReport::TABLE_HEADER, &rows),
        };
        print(&session.format.print(&reports, text)?)
    }
}
