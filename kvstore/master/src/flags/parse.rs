//! Parser for the syntax of gflags: `--flag=value`, `--flag value`, `-flag`, `--noflag`, flag files, flags from the environment.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use serde::Deserialize;

use super::flag::{FlagKind, FlagSupport};
use super::{FlagError, FlagFileError, FlagSource, FlagValues, find, nearest, table};

/// Maximum nesting depth of flag files.
const MAX_FLAGFILE_DEPTH: usize = 8;
const COMMAND_LINE: &str = "command line";

pub(super) fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<FlagValues, FlagError> {
    let arguments: Result<Vec<String>, _> = arguments.into_iter().map(OsString::into_string).collect();
    let arguments = arguments.map_err(FlagError::NotUtf8)?;
    let mut parser = FlagParser { values: FlagValues::default(), environment, allowed_unknown: Vec::new() };
    parser.collect_undefok(&arguments);
    parser.line(&arguments, COMMAND_LINE, MAX_FLAGFILE_DEPTH)?;
    parser.variables()?;
    parser.config_file()?;
    parser.read_downward_api()?;
    Ok(parser.values)
}

struct FlagParser<E> {
    values: FlagValues,
    environment: E,
    /// Names in `--undefok`, which may be unknown.
    allowed_unknown: Vec<String>,
}

impl<E: Fn(&str) -> Option<String>> FlagParser<E> {
    /// Collects `--undefok`, which applies regardless of its position.
    fn collect_undefok(&mut self, arguments: &[String]) {
        let lists =
            arguments.iter().filter_map(|argument| argument.trim_start_matches('-').strip_prefix("undefok="));
        self.allowed_unknown = lists.flat_map(|list| list.split(',')).map(str::to_owned).collect();
    }

    fn line(&mut self, arguments: &[String], source_name: &str, depth: usize) -> Result<(), FlagError> {
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            if argument == "--" {
                self.values.without_effect.extend(rest.cloned());
                break;
            }
            let Some(text) = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-')) else {
                self.values.without_effect.push(argument.clone());
                continue;
            };
            let (name, value) = match text.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (text, None),
            };
            let Some((flag, is_negated)) = self.find_flag(name, source_name)? else { continue };
            let value = match (flag.kind, value) {
                (_, Some(value)) => value,
                (FlagKind::Bool, None) if is_negated => "false",
                (FlagKind::Bool, None) => "true",
                (_, None) => rest.next().ok_or_else(|| FlagError::NoValue {
                    source_name: source_name.to_owned(),
                    name: flag.name,
                })?,
            };
            self.values.set(flag, value, FlagSource::CommandLine, source_name)?;
            self.apply_include(flag.name, value, depth)?;
        }
        Ok(())
    }

    /// The flag with this name, and whether it is negated with `no`. `None` for an unknown flag that `--undefok` allows.
    fn find_flag(
        &self,
        name: &str,
        source_name: &str,
    ) -> Result<Option<(&'static super::FlagDefinition, bool)>, FlagError> {
        if let Some(flag) = find(name) {
            return Ok(Some((flag, false)));
        }
        let negated = name.strip_prefix("no").and_then(find).filter(|flag| flag.kind == FlagKind::Bool);
        if let Some(flag) = negated {
            return Ok(Some((flag, true)));
        }
        if self.allowed_unknown.iter().any(|allowed| allowed == name) {
            return Ok(None);
        }
        let (source_name, nearest) = (source_name.to_owned(), nearest(name));
        Err(FlagError::Unknown { source_name, name: name.to_owned(), nearest })
    }

    /// Applies flags that include further flags.
    fn apply_include(&mut self, name: &str, value: &str, depth: usize) -> Result<(), FlagError> {
        match name {
            "flagfile" => value.split(',').filter(|path| !path.is_empty()).try_for_each(|path| {
                let error = |source: FlagFileError| FlagError::File {
                    flag: "flagfile",
                    path: PathBuf::from(path),
                    source,
                };
                let depth = depth.checked_sub(1).ok_or_else(|| error(FlagFileError::TooDeep))?;
                let text = fs::read_to_string(path).map_err(|problem| error(problem.into()))?;
                // Other lines name the programs that the flags are for.
                let lines = text.lines().map(str::trim).filter(|line| line.starts_with('-'));
                let lines: Vec<String> = lines.map(str::to_owned).collect();
                lines.iter().try_for_each(|line| self.line(std::slice::from_ref(line), path, depth))
            }),
            "fromenv" | "tryfromenv" => {
                value.split(',').filter(|flag| !flag.is_empty()).try_for_each(|included| {
                    let variable = format!("FLAGS_{included}");
                    match (self.environment)(&variable) {
                        Some(value) => match self.find_flag(included, "--fromenv")? {
                            Some((flag, _)) => {
                                self.values.set(flag, &value, FlagSource::CommandLine, &variable)
                            }
                            None => Ok(()),
                        },
                        None if name == "fromenv" => Err(FlagError::NoVariable(variable)),
                        None => Ok(()),
                    }
                })
            }
            _ => Ok(()),
        }
    }

    fn variables(&mut self) -> Result<(), FlagError> {
        for flag in table::FLAGS
            .iter()
            .filter(|flag| matches!(flag.support, FlagSupport::Extension | FlagSupport::Compatible))
        {
            let variable = flag.variable();
            if let Some(value) = (self.environment)(&variable) {
                self.values.set(flag, &value, FlagSource::Environment, &variable)?;
            }
        }
        Ok(())
    }

    /// Reads the variables that a pod sets from the downward API.
    fn read_downward_api(&mut self) -> Result<(), FlagError> {
        for (name, variable) in [("pod_name", "POD_NAME"), ("pod_namespace", "POD_NAMESPACE")] {
            if !self.values.text(name).is_empty() {
                continue;
            }
            if let (Some(flag), Some(value)) = (find(name), (self.environment)(variable)) {
                self.values.set(flag, &value, FlagSource::Environment, variable)?;
            }
        }
        Ok(())
    }

    fn config_file(&mut self) -> Result<(), FlagError> {
        let path = self.values.text("config_path").to_owned();
        if path.is_empty() {
            return Ok(());
        }
        // JSON is YAML.
        let read = || -> Result<BTreeMap<String, ConfigScalar>, FlagFileError> {
            Ok(serde_saphyr::from_str(&fs::read_to_string(&path)?).map_err(Box::new)?)
        };
        let entries = read().map_err(|source| FlagError::File {
            flag: "config_path",
            path: PathBuf::from(&path),
            source,
        })?;
        for (name, value) in entries {
            let Some((flag, _)) = self.find_flag(&name, &path)? else { continue };
            self.values.set(flag, &value.text(), FlagSource::File, &path)?;
        }
        Ok(())
    }
}

/// A scalar in the config file.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ConfigScalar {
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
}

impl ConfigScalar {
    fn text(&self) -> String {
        match self {
            Self::Bool(on) => on.to_string(),
            Self::Integer(number) => number.to_string(),
            Self::Float(number) => number.to_string(),
            Self::Text(text) => text.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str, variables: &[(&str, &str)]) -> Result<FlagValues, FlagError> {
        let variable = |name: &str| {
            variables.iter().find(|(candidate, _)| *candidate == name).map(|(_, value)| (*value).to_owned())
        };
        parse(line.split(' ').filter(|word| !word.is_empty()).map(OsString::from), variable)
    }

    fn value(line: &str, name: &str) -> String {
        parsed(line, &[]).unwrap().text(name).to_owned()
    }

    #[test]
    fn all_flag_syntaxes_are_parsed() {
        for line in [
            "--rpc_port=1",
            "-rpc_port=1",
            "--rpc_port 1",
            "-rpc_port 1",
            "--rpc-port=1",
            "--rpc_port=2 -rpc_port=1",
        ] {
            assert_eq!(value(line, "rpc_port"), "1", "{line}");
        }
        for (line, expected) in [
            ("", "true"),
            ("--noenable_metric_reporting", "false"),
            ("-noenable_metric_reporting --enable_metric_reporting", "true"),
            ("--enable_metric_reporting=0", "0"),
        ] {
            assert_eq!(value(line, "enable_metric_reporting"), expected, "{line}");
        }
        let values = parsed("--enable_http_metadata_server true -- --rpc_port=7", &[]).unwrap();
        assert!(values.is_on("enable_http_metadata_server"));
        assert_eq!(values.without_effect, ["true", "--rpc_port=7"]);
    }

    #[test]
    fn all_flags_of_mooncakes_master_exist() {
        let names = include_str!("../../tests/vectors/wheel_flags.txt");
        for name in names.split_whitespace() {
            assert!(find(name).is_some(), "{name}");
        }
        assert_eq!(
            table::FLAGS.iter().filter(|flag| flag.support != FlagSupport::Extension).count(),
            names.split_whitespace().count()
        );
    }

    #[test]
    fn errors_explain_the_mistake() {
        for (line, expected) in [
            ("--rpc_prot=1", "command line: unknown flag --rpc_prot; did you mean --rpc_port?"),
            ("--zzz", "command line: unknown flag --zzz; --help lists them"),
            ("--norpc_port", "unknown flag --norpc_port; did you mean --rpc_port?"),
            ("--rpc_port", "command line: --rpc_port needs a value: --rpc_port=VALUE"),
            ("--rpc_port=70000", "invalid value `70000` for --rpc_port; expected an integer from 0 to 65535"),
            ("--fromenv=rpc_port", "FLAGS_rpc_port for --fromenv is not set"),
            ("--flagfile=/no/such", "cannot read /no/such (--flagfile): No such file"),
        ] {
            let error = parsed(line, &[]).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
        assert!(parsed("--later=1 --undefok=later,other", &[]).is_ok());
    }

    #[test]
    fn flags_override_environment_which_overrides_file() {
        let file = std::env::temp_dir().join(format!("moongate-master-{}.yaml", std::process::id()));
        fs::write(&file, "rpc_port: 1\nmetrics_port: 1\nclient_ttl: 1\nenable_kv_events: true\n").unwrap();
        let config = format!("--config_path={}", file.display());
        let variables = [("MOONGATE_RPC_PORT", "2"), ("MOONGATE_METRICS_PORT", "2"), ("FLAGS_port", "4")];
        let values = parsed(&format!("{config} --rpc_port=3 --fromenv=port"), &variables).unwrap();
        for (name, expected) in [
            ("rpc_port", "3"),
            ("metrics_port", "2"),
            ("client_ttl", "1"),
            ("port", "4"),
            ("enable_kv_events", "true"),
        ] {
            assert_eq!(values.text(name), expected, "{name}");
        }
        fs::write(&file, "{\"rpc_prot\": 1}").unwrap();
        let error = parsed(&config, &[]).unwrap_err().to_string();
        assert!(error.contains("did you mean --rpc_port?"), "{error}");
        fs::write(&file, "# for all\n--rpc_port=5\nmooncake_master\n-noenable_disk_eviction\n").unwrap();
        let values = parsed(&format!("--flagfile={}", file.display()), &[]).unwrap();
        assert_eq!((values.text("rpc_port"), values.is_on("enable_disk_eviction")), ("5", false));
        fs::write(&file, format!("--flagfile={}", file.display())).unwrap();
        let error = parsed(&format!("--flagfile={}", file.display()), &[]).unwrap_err().to_string();
        assert!(error.contains("too many nested flag files"), "{error}");
        fs::remove_file(&file).unwrap();
    }
}
