//! Why settings are invalid.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use super::CONFIG_ENV;

/// The settings are invalid, or help was requested.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The command line or environment is invalid, or help was requested.
    #[error("{0}")]
    Usage(#[from] clap::Error),
    /// The config file cannot be read.
    #[error("cannot read the config file {}: {source}; check the path given by --config or {CONFIG_ENV}", path.display())]
    Read {
        /// Path of the config file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The config file is not TOML.
    #[error("{} is not valid TOML: {}", path.display(), error.to_string().trim_end())]
    Syntax {
        /// Path of the config file.
        path: PathBuf,
        /// Line, column and an excerpt of the file. Not a source: in a chain it would be repeated, because its text is trimmed here.
        error: toml::de::Error,
    },
    /// A key or its value is invalid.
    #[error("{}:{line}: {source}", path.display())]
    Entry {
        /// Path of the config file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
        /// What is wrong and how to fix it.
        source: ConfigEntryError,
    },
}

impl ConfigError {
    /// Prints the error and returns the exit code: 0 for help and version, else 2.
    pub fn report(&self) -> ExitCode {
        if let Self::Usage(error) = self {
            // If the terminal is closed, the message is lost.
            let _ = error.print();
            return u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
        }
        let _ = writeln!(io::stderr(), "error: {self}");
        ExitCode::from(2)
    }
}

/// Why one key of the config file is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigEntryError {
    /// The command has no such setting; `similar` has the most similar name.
    #[error("`{command}` has no setting `{key}`; {}", unknown_key_fix(command, similar.as_deref()))]
    UnknownKey { command: String, key: String, similar: Option<String> },
    /// The key has no setting's name, and its value is a table.
    #[error("`{0}` is a table; settings are not grouped: write the key without a table")]
    Table(String),
    #[error("`{0}` is set twice; remove one of the two")]
    SetTwice(String),
    /// The TOML value has another type than the setting.
    #[error("`{key}` {expected}, not {found}")]
    Type { key: String, expected: &'static str, found: &'static str },
    /// The setting does not accept the value. Clap's error is not a source: in a chain it would be repeated.
    #[error("{}", without_usage(error))]
    Value { key: String, error: clap::Error },
}

fn unknown_key_fix(command: &str, similar: Option<&str>) -> String {
    match similar {
        Some(similar) => format!("did you mean `{similar}`?"),
        None => format!("`{command} --help` lists them, without `--`"),
    }
}

/// Clap's message for a flag, without the hints for a command line.
fn without_usage(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.split_once("\n\nFor more information").map_or(text.as_str(), |(before, _)| before);
    text.trim_start_matches("error: ").trim_end().to_owned()
}
