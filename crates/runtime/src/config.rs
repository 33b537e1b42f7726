//! Flag, environment variable and config key of a setting are one thing with one name.
//!
//! A command declares its settings once, as clap arguments. A config file is a flat TOML table whose keys are
//! the long flags (`admin-listen` or `admin_listen`) of the chosen subcommand:
//!
//! ```toml
//! listen = "0.0.0.0:8080"
//! static-endpoint = ["prefill=http://10.0.0.1:8000", "decode=http://10.0.0.2:8000"]  # a repeated flag
//! allow-origin = true                                                               # a flag without value
//! ```
//!
//! The file is named by the subcommand's own `--config` (or its environment variable). A value comes from the
//! flag, else the environment, else the file, else the default. The file's values are checked one by one even
//! where they are overridden, so that a mistake does not wait for the day the flag goes away.
//!
//! clap sees the file's values as defaults: `requires` and `conflicts_with` look at flags and environment only.

mod file;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};

use file::{ConfigFileEntry, ConfigFileValue};

/// The long flag that names the config file.
const CONFIG_FLAG: &str = "config";
/// Its environment variable, where the command has not declared another.
const CONFIG_ENV: &str = "MOONGATE_CONFIG";
/// A key is offered as a correction from this likeness (Jaro, 0 to 1) on.
const MIN_SIMILARITY: f64 = 0.75;

/// The settings could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The command line or the environment is wrong, or help was asked for.
    #[error("{0}")]
    Usage(#[from] clap::Error),
    /// The config file cannot be read.
    #[error("cannot read the config file {}: {source}; check the path given by --config or {CONFIG_ENV}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The config file is not TOML.
    #[error("{} is not valid TOML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and an excerpt.
        message: String,
    },
    /// A key or its value is wrong.
    #[error("{}:{line}: {problem}", path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// As written in the file.
        key: String,
        /// What is wrong and how to mend it.
        problem: String,
    },
}

impl ConfigError {
    /// Tells the person and gives the exit code: 0 where help or the version was asked for, else 2.
    pub fn report(&self) -> ExitCode {
        if let Self::Usage(error) = self {
            // A closed terminal leaves nobody to tell.
            let _ = error.print();
            return u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
        }
        let _ = writeln!(io::stderr(), "error: {self}");
        ExitCode::from(2)
    }
}

/// Where the value of a setting comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingOrigin {
    /// The command line.
    Flag,
    /// The environment.
    Env,
    /// The config file.
    File,
    /// Built in.
    Default,
}

impl fmt::Display for SettingOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Flag => "flag",
            Self::Env => "env",
            Self::File => "file",
            Self::Default => "default",
        })
    }
}

/// One setting as it takes effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveSetting {
    /// Config key, which is the long flag without its dashes.
    pub key: String,
    /// The value as text, several ones separated by commas; `None` where nothing is set. A setting declared
    /// with `hide_env_values` (a secret) reads `(hidden)`.
    pub value: Option<String>,
    /// Where the value comes from.
    pub origin: SettingOrigin,
    /// The environment variable that sets it.
    pub env: Option<String>,
}

/// Reads the settings of `C` from `args` (the program's name first), the environment, and the config file.
///
/// # Errors
/// [`ConfigError`]; help and `--version` come as [`ConfigError::Usage`] too, as in clap.
pub fn parse<C>(args: impl IntoIterator<Item = OsString>) -> Result<C, ConfigError>
where
    C: CommandFactory + FromArgMatches,
{
    let mut resolved = ResolvedCommand::new(C::command(), args)?;
    C::from_arg_matches_mut(&mut resolved.matches).map_err(|error| error.format(&mut resolved.command).into())
}

/// Lists every setting of the subcommand that `args` choose, with its value and origin.
///
/// # Errors
/// As [`parse`].
pub fn effective_settings<C>(
    args: impl IntoIterator<Item = OsString>,
) -> Result<Vec<EffectiveSetting>, ConfigError>
where
    C: CommandFactory,
{
    Ok(ResolvedCommand::new(C::command(), args)?.settings())
}

/// Names of the environment variables that settings of the command and its subcommands have.
#[must_use]
pub fn environment_variables(command: Command) -> BTreeSet<String> {
    let command = with_config_env(command);
    let mut names = BTreeSet::new();
    let mut left = vec![&command];
    while let Some(command) = left.pop() {
        let variables = command.get_arguments().filter_map(Arg::get_env);
        names.extend(variables.map(|name| name.to_string_lossy().into_owned()));
        left.extend(command.get_subcommands());
    }
    names
}

/// A command whose defaults hold the file's values, and what it makes of the arguments.
struct ResolvedCommand {
    command: Command,
    matches: ArgMatches,
    /// Names of the chosen subcommand and its parents, outermost first.
    path: Vec<String>,
    /// Keys the file sets.
    from_file: Vec<String>,
}

impl ResolvedCommand {
    fn new(command: Command, args: impl IntoIterator<Item = OsString>) -> Result<Self, ConfigError> {
        let args: Vec<OsString> = args.into_iter().collect();
        let mut command = with_config_env(command);
        // Required arguments may be in the file that this parse has to find, so it must not mind their absence.
        let lenient = command.clone().ignore_errors(true).try_get_matches_from(&args)?;
        let path = chosen_subcommands(&command, &lenient);
        let mut from_file = Vec::new();
        if let Some(file) = config_path(&command, &lenient, &path) {
            for entry in file::read(&file)? {
                let error = |problem| ConfigError::Entry {
                    path: file.clone(),
                    line: entry.line,
                    key: entry.key.clone(),
                    problem,
                };
                let (depth, arg) = find_argument(&command, &path, &entry.key)
                    .ok_or_else(|| error(unknown_key_message(&command, &path, &entry)))?;
                let id = arg.get_id().clone();
                let key = arg.get_long().unwrap_or_default().to_owned();
                if from_file.contains(&key) {
                    return Err(error(format!("`{key}` is set twice; remove one of the two")));
                }
                let values = as_defaults(arg, &key, &entry).map_err(&error)?;
                from_file.push(key);
                command = set_default(command, &path[..depth], id.as_str(), values);
            }
        }
        let matches = command.try_get_matches_from_mut(&args)?;
        Ok(Self { command, matches, path, from_file })
    }

    fn settings(&self) -> Vec<EffectiveSetting> {
        let mut settings: Vec<EffectiveSetting> = Vec::new();
        let mut matches = Some(&self.matches);
        for (depth, command) in commands_on_path(&self.command, &self.path).into_iter().enumerate() {
            let Some(here) = matches else { break };
            for arg in command.get_arguments().filter(|arg| is_setting(arg)) {
                let Some(key) = arg.get_long() else { continue };
                if !settings.iter().any(|known| known.key == key) {
                    settings.push(self.setting(arg, key, here));
                }
            }
            matches = self.path.get(depth).and_then(|name| here.subcommand_matches(name));
        }
        settings
    }

    fn setting(&self, arg: &Arg, key: &str, matches: &ArgMatches) -> EffectiveSetting {
        let id = arg.get_id().as_str();
        let origin = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => SettingOrigin::Flag,
            Some(ValueSource::EnvVariable) => SettingOrigin::Env,
            _ if self.from_file.iter().any(|known| known == key) => SettingOrigin::File,
            _ => SettingOrigin::Default,
        };
        let value = matches.try_get_raw(id).ok().flatten().map(|values| {
            if arg.is_hide_env_values_set() {
                "(hidden)".to_owned()
            } else {
                values.map(|value| value.to_string_lossy()).collect::<Vec<_>>().join(",")
            }
        });
        let env = arg.get_env().map(|name| name.to_string_lossy().into_owned());
        EffectiveSetting { key: key.to_owned(), value, origin, env }
    }
}

/// Gives every `--config` its environment variable, so that no command can forget it.
fn with_config_env(command: Command) -> Command {
    command
        .mut_args(|arg| {
            if arg.get_long() == Some(CONFIG_FLAG) && arg.get_env().is_none() {
                arg.env(CONFIG_ENV)
            } else {
                arg
            }
        })
        .mut_subcommands(with_config_env)
}

fn chosen_subcommands(command: &Command, matches: &ArgMatches) -> Vec<String> {
    let mut path = Vec::new();
    let (mut command, mut matches) = (command, matches);
    while let Some((name, inner)) = matches.subcommand() {
        // An external subcommand has matches but no declaration.
        let Some(next) = command.find_subcommand(name) else { break };
        path.push(next.get_name().to_owned());
        (command, matches) = (next, inner);
    }
    path
}

/// The root and each subcommand down the path.
fn commands_on_path<'a>(command: &'a Command, path: &[String]) -> Vec<&'a Command> {
    let mut commands = vec![command];
    let mut command = command;
    for name in path {
        let Some(next) = command.find_subcommand(name) else { break };
        commands.push(next);
        command = next;
    }
    commands
}

fn config_path(command: &Command, matches: &ArgMatches, path: &[String]) -> Option<PathBuf> {
    let mut found = None;
    let mut matches = Some(matches);
    for (depth, command) in commands_on_path(command, path).into_iter().enumerate() {
        let here = matches?;
        let flag = command.get_arguments().find(|arg| arg.get_long() == Some(CONFIG_FLAG));
        // The innermost subcommand that has the flag decides.
        found = flag
            .and_then(|arg| here.try_get_raw(arg.get_id().as_str()).ok()??.next())
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
            .or(found);
        matches = path.get(depth).and_then(|name| here.subcommand_matches(name));
    }
    found
}

/// Whether the file may set it: help and version act, and the path of the file cannot be in the file.
fn is_setting(arg: &Arg) -> bool {
    arg.get_long().is_some_and(|long| long != CONFIG_FLAG)
        && matches!(
            arg.get_action(),
            ArgAction::Set | ArgAction::Append | ArgAction::SetTrue | ArgAction::SetFalse | ArgAction::Count
        )
}

/// The argument that a key means and how deep in the path it is declared; the innermost wins.
fn find_argument<'a>(command: &'a Command, path: &[String], key: &str) -> Option<(usize, &'a Arg)> {
    let flag = key.replace('_', "-");
    commands_on_path(command, path).into_iter().enumerate().rev().find_map(|(depth, command)| {
        let arg = command.get_arguments().find(|arg| arg.get_long() == Some(&flag) && is_setting(arg))?;
        Some((depth, arg))
    })
}

fn unknown_key_message(command: &Command, path: &[String], entry: &ConfigFileEntry) -> String {
    let flag = entry.key.replace('_', "-");
    let mut usage = command.get_name().to_owned();
    for name in path {
        usage.push(' ');
        usage.push_str(name);
    }
    let nearest = commands_on_path(command, path)
        .into_iter()
        .flat_map(Command::get_arguments)
        .filter(|arg| is_setting(arg))
        .filter_map(Arg::get_long)
        .map(|long| (strsim::jaro(long, &flag), long))
        .filter(|(alike, _)| *alike >= MIN_SIMILARITY)
        .max_by(|one, other| one.0.total_cmp(&other.0));
    match (&entry.value, nearest) {
        (ConfigFileValue::Table, None) => {
            format!("`{}` is a table; settings are not grouped: write the key alone", entry.key)
        }
        (_, Some((_, long))) => format!("`{usage}` has no setting `{}`; did you mean `{long}`?", entry.key),
        (_, None) => {
            format!("`{usage}` has no setting `{}`; `{usage} --help` lists them, without `--`", entry.key)
        }
    }
}

/// The file's value as clap's defaults for the argument.
fn as_defaults(arg: &Arg, key: &str, entry: &ConfigFileEntry) -> Result<Vec<String>, String> {
    let values: &[ConfigFileValue] = match &entry.value {
        ConfigFileValue::Array(values) if takes_multiple_values(arg) => values,
        ConfigFileValue::Array(_) => return Err(format!("`{key}` takes one value, not an array")),
        one => std::slice::from_ref(one),
    };
    let mut texts = Vec::with_capacity(values.len());
    for value in values {
        let text = match (value, arg.get_action()) {
            (ConfigFileValue::Bool(on), ArgAction::SetTrue | ArgAction::SetFalse) => on.to_string(),
            (_, ArgAction::SetTrue | ArgAction::SetFalse) => {
                return Err(format!("`{key}` is true or false, not {}", value.kind()));
            }
            (ConfigFileValue::Bool(on), _) if takes_bool(arg) => on.to_string(),
            (ConfigFileValue::Text(text) | ConfigFileValue::Number(text), _) => text.clone(),
            (
                ConfigFileValue::Bool(_)
                | ConfigFileValue::Array(_)
                | ConfigFileValue::Table
                | ConfigFileValue::Other,
                _,
            ) => {
                return Err(format!("`{key}` takes a string or a number, not {}", value.kind()));
            }
        };
        validate_value(arg, key, &text)?;
        texts.push(text);
    }
    Ok(texts)
}

fn takes_multiple_values(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
        || arg.get_value_delimiter().is_some()
        || arg.get_num_args().is_some_and(|range| range.max_values() > 1)
}

fn takes_bool(arg: &Arg) -> bool {
    arg.get_possible_values().iter().any(|value| value.matches("true", false))
}

/// Lets clap judge one value of one argument. In the real parse a bad value could not be told from one on the
/// command line.
fn validate_value(arg: &Arg, key: &str, text: &str) -> Result<(), String> {
    let mut alone = Arg::new("value")
        .long(key.to_owned())
        .action(ArgAction::Append)
        .value_parser(arg.get_value_parser().clone())
        .ignore_case(arg.is_ignore_case_set());
    if let Some(names) = arg.get_value_names() {
        alone = alone.value_names(names.to_vec());
    }
    if let Some(delimiter) = arg.get_value_delimiter() {
        alone = alone.value_delimiter(delimiter);
    }
    let judged = Command::new("file")
        .no_binary_name(true)
        .disable_help_flag(true)
        .arg(alone)
        .try_get_matches_from([format!("--{key}={text}")]);
    judged.map(drop).map_err(|error| {
        let text = error.render().to_string();
        let text = text.split_once("\n\nFor more information").map_or(text.as_str(), |(before, _)| before);
        text.trim_start_matches("error: ").trim_end().to_owned()
    })
}

fn set_default(command: Command, path: &[String], id: &str, values: Vec<String>) -> Command {
    match path.split_first() {
        Some((name, rest)) if command.find_subcommand(name).is_some() => {
            command.mut_subcommand(name, |inner| set_default(inner, rest, id, values))
        }
        _ => command.mut_arg(id, |arg| arg.required(false).default_values(values)),
    }
}
