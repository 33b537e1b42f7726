//! Programs that print their addresses when they are ready.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use moongate_runtime::Supervisor;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// How long a program may take until it is ready.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Starts a program with an empty environment, so that the machine's settings have no effect, and reads its log until all lines
/// that contain the first texts have appeared, in their order. Returns the fields of these lines that start with the second
/// ones.
pub(super) async fn start<const N: usize>(
    program: &Path,
    flags: &[String],
    fields: [(&str, &str); N],
    supervisor: &Supervisor,
) -> anyhow::Result<(Child, [String; N])> {
    let mut child = Command::new(program)
        .args(flags)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let stderr = child.stderr.take().context("the program has no standard error")?;
    let mut lines = BufReader::new(stderr).lines();
    let mut found: [String; N] = std::array::from_fn(|_| String::new());
    let mut last = String::new();
    let reading = async {
        for (value, (text, field)) in found.iter_mut().zip(fields) {
            loop {
                let Some(line) = lines.next_line().await? else {
                    anyhow::bail!("it exited before it was ready; its last line: {last}");
                };
                let word = line.split_whitespace().find_map(|word| word.strip_prefix(field));
                if let (true, Some(word)) = (line.contains(text), word) {
                    word.clone_into(value);
                    break;
                }
                tracing::debug!(line, "output");
                last = line;
            }
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(START_TIMEOUT, reading).await.context("it does not start")??;
    // Keep reading: a program that writes to a closed pipe fails.
    supervisor.spawn("live-log", async move { while let Ok(Some(_)) = lines.next_line().await {} });
    Ok((child, found))
}
