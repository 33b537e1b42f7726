//! What a command writes for the person who runs it. Unlike `println!`, a closed pipe or a full disk does not end the process.

use std::fmt::Display;
use std::io::{self, Write as _};

use anyhow::Context as _;

/// Writes a text and a line end to standard output.
pub(crate) fn print(text: impl Display) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).context("cannot write to standard output")
}

/// Writes `error: …` to standard error. If that fails there is nowhere else to write to; the exit code remains.
pub(crate) fn print_error(error: impl Display) {
    let _ = writeln!(io::stderr(), "error: {error}");
}
