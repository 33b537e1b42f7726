//! Output of commands to the terminal. Unlike with `println!`, a closed pipe or a full disk does not cause a panic.

use std::fmt::Display;
use std::io::{self, Write as _};

use anyhow::Context as _;

/// Writes `text` and a newline to standard output.
pub(crate) fn print(text: impl Display) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).context("cannot write to standard output")
}

/// Writes `error: …` to standard error. A failure is ignored: the exit code still reports the error.
pub(crate) fn print_error(error: impl Display) {
    let _ = writeln!(io::stderr(), "error: {error}");
}
