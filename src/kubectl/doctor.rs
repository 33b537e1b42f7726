//! `moongate kubectl doctor`

use std::process::ExitCode;

use moongate_operator::kubectl::{diagnose, findings_text};

use super::{KubectlSession, print};

/// Prints what is found; the exit code is 1 if something is wrong.
pub(super) async fn run(session: &KubectlSession) -> anyhow::Result<ExitCode> {
    let findings = diagnose(&session.cluster).await;
    print(&session.format.print(&findings, || findings_text(&findings))?)?;
    let is_well = findings.iter().all(|finding| !finding.is_fault);
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
