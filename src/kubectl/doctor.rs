//! The command `moongate kubectl doctor`.

use std::process::ExitCode;

use moongate_operator::kubectl::{diagnose, findings_text};

use super::{KubectlSession, print};

/// Prints the checks; the exit code is 1 if there is a problem.
pub(super) async fn run(session: &KubectlSession) -> anyhow::Result<ExitCode> {
    let findings = diagnose(&session.cluster).await;
    print(&session.format.print(&findings, || findings_text(&findings))?)?;
    let is_healthy = findings.iter().all(|finding| !finding.is_problem);
    Ok(if is_healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
