//! Generates the text of `--help`.

use std::fmt::Write as _;

use super::flag::{FlagDefinition, FlagKind, FlagSupport};
use super::table::FLAGS;

/// Maximum width of the list of ignored flags.
const WIDTH: usize = 100;

/// The help text: Moongate's flags first, then those of Mooncake's master.
pub(super) fn text() -> String {
    let mut text = String::from(
        "A Mooncake-compatible master for clients of every release since 0.3.9, also at the same time.\n\n\
         Usage: moongate master [--FLAG=VALUE | --FLAG VALUE | --SWITCH | --noSWITCH]...\n\n\
         Every flag is also an environment variable: MOONGATE_RPC_PORT is --rpc_port.\n",
    );
    section(&mut text, "Flags of Moongate", FlagSupport::Extension);
    section(&mut text, "Flags of Mooncake's master", FlagSupport::Compatible);
    section(&mut text, "Unsupported flags of Mooncake's master", FlagSupport::Unsupported);
    text.push_str("\nIgnored flags of Mooncake's master (accepted for compatibility):\n");
    let mut line = String::from(" ");
    for flag in FLAGS.iter().filter(|flag| flag.support == FlagSupport::Ignored) {
        if line.len() + flag.name.len() >= WIDTH {
            text.push_str(&line);
            text.push('\n');
            line.truncate(1);
        }
        line.push(' ');
        line.push_str(flag.name);
    }
    text.push_str(&line);
    text.push('\n');
    text
}

fn section(text: &mut String, title: &str, usage: FlagSupport) {
    let _ = writeln!(text, "\n{title}:");
    for flag in FLAGS.iter().filter(|flag| flag.support == usage) {
        let _ = writeln!(text, "  --{}{}\n      {}{}", flag.name, value(flag), flag.help, default(flag));
    }
}

fn value(flag: &FlagDefinition) -> String {
    match flag.kind {
        FlagKind::Bool => String::new(),
        FlagKind::Number(..) | FlagKind::Float => "=N".to_owned(),
        FlagKind::Text => "=TEXT".to_owned(),
        FlagKind::Duration => "=TIME".to_owned(),
        FlagKind::Choice(words) => format!("={}", words.join("|")),
    }
}

fn default(flag: &FlagDefinition) -> String {
    if flag.default.is_empty() { String::new() } else { format!(" [default: {}]", flag.default) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_is_in_the_help() {
        let text = text();
        for flag in FLAGS {
            assert!(text.contains(flag.name), "{}", flag.name);
        }
        assert!(text.find("--default_dialect") < text.find("--rpc_port=N"));
        assert!(text.lines().all(|line| line.len() <= 130));
    }
}
