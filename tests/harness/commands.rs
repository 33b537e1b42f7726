//! Commands that a test runs to their end.

use std::time::Duration;

use tokio::process::Command;

/// Runs a command, and returns both its outputs; fails the test if the command fails, or still runs after `limit`.
pub(crate) async fn run_to_success(limit: Duration, command: &mut Command) -> String {
    let ran = tokio::time::timeout(limit, command.kill_on_drop(true).output()).await;
    let ran = ran.unwrap_or_else(|_| panic!("{command:?} still runs after {limit:?}"));
    let ran = ran.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let output = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{command:?}: {}\n{output}", ran.status);
    output
}
