//! `moongate kubectl doctor`

use std::process::ExitCode;

use moongate_operator::kubectl::{examine, told};

use super::{Session, print};

/// Prints what is found; the exit code is 1 if something is wrong.
pub(super) async fn run(session: &Session) -> anyhow::Result<ExitCode> {
    let findings = examine(&session.cluster).await;
    print(&session.format.print(&findings, || told(&findings))?)?;
    let is_well = findings.iter().all(|finding| !finding.is_fault);
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
