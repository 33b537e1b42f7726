//! Settings from flags, environment variables and a config file, under one name each.
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
//! The file is given by the subcommand's own `--config` (or its environment variable). Precedence: flag, environment, file, default. All
//! values in the file are validated, even overridden ones, so that a mistake shows before the flag is removed.
//!
//! To clap, the file's values are defaults: `requires` and `conflicts_with` consider flags and environment only.

mod error;
mod file;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};

pub use error::{ConfigEntryError, ConfigError};
use file::{ConfigFileEntry, ConfigFileValue};

/// Long flag with the path of the config file.
const CONFIG_FLAG: &str = "config";
/// Environment variable for [`CONFIG_FLAG`], unless the command declares another.
const CONFIG_ENV: &str = "MOONGATE_CONFIG";
/// Minimum similarity (Jaro, 0 to 1) for suggesting a key as a correction.
const MIN_SIMILARITY: f64 = 0.75;

/// Source of a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingOrigin {
    /// Set on the command line.
    Flag,
    /// Set by its environment variable.
    Env,
    /// Set in the config file.
    File,
    /// The built-in default, or unset.
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

/// The effective value of one setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveSetting {
    /// Config key: the long flag without leading dashes.
    pub key: String,
    /// The value as text, several values separated by commas; `None` if unset. Settings declared with `hide_env_values` (secrets) read
    /// `(hidden)`.
    pub value: Option<String>,
    pub origin: SettingOrigin,
    /// Environment variable of the setting, if any.
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

/// Lists every setting of the subcommand selected by `args`, with value and source.
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

/// Environment variables of all settings of the command and its subcommands.
#[must_use]
pub fn environment_variables(command: Command) -> BTreeSet<String> {
    let command = with_config_env(command);
    let mut names = BTreeSet::new();
    let mut pending = vec![&command];
    while let Some(command) = pending.pop() {
        let variables = command.get_arguments().filter_map(Arg::get_env);
        names.extend(variables.map(|name| name.to_string_lossy().into_owned()));
        pending.extend(command.get_subcommands());
    }
    names
}

/// A command with the file's values as defaults, and its parsed arguments.
struct ResolvedCommand {
    command: Command,
    matches: ArgMatches,
    /// Selected subcommand and its parents, outermost first.
    path: Vec<String>,
    /// Keys that are set in the file.
    from_file: Vec<String>,
}

impl ResolvedCommand {
    fn new(command: Command, args: impl IntoIterator<Item = OsString>) -> Result<Self, ConfigError> {
        let args: Vec<OsString> = args.into_iter().collect();
        let mut command = with_config_env(command);
        // Required arguments may be in the file, whose path this parse has to find, so their absence is ignored.
        let lenient = command.clone().ignore_errors(true).try_get_matches_from(&args)?;
        let path = chosen_subcommands(&command, &lenient);
        let mut from_file = Vec::new();
        if let Some(file) = config_path(&command, &lenient, &path) {
            for entry in file::read(&file)? {
                let error = |source| ConfigError::Entry { path: file.clone(), line: entry.line, source };
                let (depth, arg) = find_argument(&command, &path, &entry.key)
                    .ok_or_else(|| error(unknown_key(&command, &path, &entry)))?;
                let id = arg.get_id().clone();
                let key = arg.get_long().unwrap_or_default().to_owned();
                if from_file.contains(&key) {
                    return Err(error(ConfigEntryError::SetTwice(key)));
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
            let Some(own) = matches else { break };
            for arg in command.get_arguments().filter(|arg| is_setting(arg)) {
                let Some(key) = arg.get_long() else { continue };
                if !settings.iter().any(|known| known.key == key) {
                    settings.push(self.setting(arg, key, own));
                }
            }
            matches = self.path.get(depth).and_then(|name| own.subcommand_matches(name));
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

/// Adds the environment variable to every `--config` flag, so that no command can omit it.
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

/// The root command and each subcommand on the path.
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
        // The innermost subcommand with the flag takes precedence.
        found = flag
            .and_then(|arg| here.try_get_raw(arg.get_id().as_str()).ok()??.next())
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
            .or(found);
        matches = path.get(depth).and_then(|name| here.subcommand_matches(name));
    }
    found
}

/// Whether the file may set the argument: help and version are actions, and the file cannot contain its own path.
fn is_setting(arg: &Arg) -> bool {
    arg.get_long().is_some_and(|long| long != CONFIG_FLAG)
        && matches!(
            arg.get_action(),
            ArgAction::Set | ArgAction::Append | ArgAction::SetTrue | ArgAction::SetFalse | ArgAction::Count
        )
}

/// The argument of a key and its depth in the path; the innermost wins.
fn find_argument<'a>(command: &'a Command, path: &[String], key: &str) -> Option<(usize, &'a Arg)> {
    let flag = key.replace('_', "-");
    commands_on_path(command, path).into_iter().enumerate().rev().find_map(|(depth, command)| {
        let arg = command.get_arguments().find(|arg| arg.get_long() == Some(&flag) && is_setting(arg))?;
        Some((depth, arg))
    })
}

fn unknown_key(command: &Command, path: &[String], entry: &ConfigFileEntry) -> ConfigEntryError {
    let flag = entry.key.replace('_', "-");
    let nearest = commands_on_path(command, path)
        .into_iter()
        .flat_map(Command::get_arguments)
        .filter(|arg| is_setting(arg))
        .filter_map(Arg::get_long)
        .map(|long| (strsim::jaro(long, &flag), long))
        .filter(|(similarity, _)| *similarity >= MIN_SIMILARITY)
        .max_by(|left, right| left.0.total_cmp(&right.0));
    if let (ConfigFileValue::Table, None) = (&entry.value, nearest) {
        return ConfigEntryError::Table(entry.key.clone());
    }
    let mut usage = command.get_name().to_owned();
    for name in path {
        usage.push(' ');
        usage.push_str(name);
    }
    let similar = nearest.map(|(_, long)| long.to_owned());
    ConfigEntryError::UnknownKey { command: usage, key: entry.key.clone(), similar }
}

/// Converts the file's value to clap defaults for the argument.
fn as_defaults(arg: &Arg, key: &str, entry: &ConfigFileEntry) -> Result<Vec<String>, ConfigEntryError> {
    let wrong_type = |expected, found: &ConfigFileValue| ConfigEntryError::Type {
        key: key.to_owned(),
        expected,
        found: found.kind(),
    };
    let values: &[ConfigFileValue] = match &entry.value {
        ConfigFileValue::Array(values) if takes_multiple_values(arg) => values,
        array @ ConfigFileValue::Array(_) => return Err(wrong_type("takes one value", array)),
        single => std::slice::from_ref(single),
    };
    let mut texts = Vec::with_capacity(values.len());
    for value in values {
        let text = match (value, arg.get_action()) {
            (ConfigFileValue::Bool(on), ArgAction::SetTrue | ArgAction::SetFalse) => on.to_string(),
            (_, ArgAction::SetTrue | ArgAction::SetFalse) => {
                return Err(wrong_type("is true or false", value));
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
                return Err(wrong_type("takes a string or a number", value));
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

/// Validates one value of one argument with clap. In the real parse an invalid default would be reported as if given on the command line.
fn validate_value(arg: &Arg, key: &str, text: &str) -> Result<(), ConfigEntryError> {
    let mut argument = Arg::new("value")
        .long(key.to_owned())
        .action(ArgAction::Append)
        .value_parser(arg.get_value_parser().clone())
        .ignore_case(arg.is_ignore_case_set());
    if let Some(names) = arg.get_value_names() {
        argument = argument.value_names(names.to_vec());
    }
    if let Some(delimiter) = arg.get_value_delimiter() {
        argument = argument.value_delimiter(delimiter);
    }
    let parsed = Command::new("file")
        .no_binary_name(true)
        .disable_help_flag(true)
        .arg(argument)
        .try_get_matches_from([format!("--{key}={text}")]);
    parsed.map(drop).map_err(|error| ConfigEntryError::Value { key: key.to_owned(), error })
}

fn set_default(command: Command, path: &[String], id: &str, values: Vec<String>) -> Command {
    match path.split_first() {
        Some((name, rest)) if command.find_subcommand(name).is_some() => {
            command.mut_subcommand(name, |inner| set_default(inner, rest, id, values))
        }
        _ => command.mut_arg(id, |arg| arg.required(false).default_values(values)),
    }
}
