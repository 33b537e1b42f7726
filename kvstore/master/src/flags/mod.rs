//! Command line of Mooncake's master, extended with flags of Moongate.
//!
//! Sources of a value in order of precedence: the command line (including `--flagfile` and `--fromenv`), the environment (`MOONGATE_`
//! and the flag's name in capitals), the file in `--config_path`, the default.

mod disks;
mod flag;
mod ha;
mod help;
mod options;
mod parse;
mod store_tls;
mod table;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

pub use ha::{HaBackend, HaFlags};
pub use options::{KvEventFlags, MasterOptions, MetadataFlags};

use flag::FlagDefinition;

/// Minimum similarity of a suggested name to an unknown one (Jaro, 0 to 1).
const MIN_SIMILARITY: f64 = 0.75;

/// The command line, the environment or a file is invalid.
#[derive(Debug, thiserror::Error)]
pub enum FlagError {
    /// There is no flag with this name.
    #[error("{source_name}: unknown flag --{name}{}", suggestion(.nearest.as_ref()))]
    Unknown {
        /// Source of the flag, such as "command line".
        source_name: String,
        name: String,
        /// The most similar flag name.
        nearest: Option<&'static str>,
    },
    /// A flag without a value.
    #[error("{source_name}: --{name} needs a value: --{name}=VALUE")]
    NoValue {
        /// Source of the flag, such as "command line".
        source_name: String,
        name: &'static str,
    },
    /// Invalid files for TLS with the store's other programs.
    #[error(transparent)]
    Tls(#[from] moongate_runtime::TlsConfigError),
    /// The value is invalid for this flag.
    #[error("{source_name}: invalid value `{value}` for --{name}; expected {expected}")]
    Value {
        /// Source of the flag, such as "command line".
        source_name: String,
        name: &'static str,
        value: String,
        /// Description of the expected values.
        expected: String,
    },
    /// An argument is not valid UTF-8.
    #[error("an argument is not UTF-8: {0:?}")]
    NotUtf8(OsString),
    /// A file in a flag cannot be read.
    #[error("cannot read {} (--{flag}): {source}", path.display())]
    File { flag: &'static str, path: PathBuf, source: FlagFileError },
    /// A variable of `--fromenv` is not set.
    #[error("{0} for --fromenv is not set; set it, or use --tryfromenv")]
    NoVariable(String),
}

/// Why a file with flags cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FlagFileError {
    #[error("too many nested flag files")]
    TooDeep,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Yaml(#[from] Box<serde_saphyr::Error>),
}

fn suggestion(nearest: Option<&&'static str>) -> String {
    nearest.map_or_else(|| "; --help lists them".to_owned(), |name| format!("; did you mean --{name}?"))
}

/// What a command line requests.
#[derive(Debug)]
pub enum MasterInvocation {
    /// Run a master with these options.
    Serve(Box<MasterOptions>),
    /// Print this text and exit.
    PrintText(String),
}

/// Source of a value; later ones take precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FlagSource {
    File,
    Environment,
    CommandLine,
}

/// The values from all sources.
#[derive(Debug, Default)]
struct FlagValues {
    values: BTreeMap<&'static str, (String, FlagSource)>,
    /// Arguments without a flag.
    without_effect: Vec<String>,
}

/// Parses the command line, without the names of the program and the subcommand.
///
/// # Errors
/// [`FlagError`].
pub fn read(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<MasterInvocation, FlagError> {
    let values = parse::parse(arguments, environment)?;
    for name in ["help", "helpfull", "helpshort", "helppackage", "helpxml"] {
        if values.is_on(name) {
            return Ok(MasterInvocation::PrintText(help::text()));
        }
    }
    if values.is_on("version") {
        return Ok(MasterInvocation::PrintText(format!("moongate master {}\n", env!("CARGO_PKG_VERSION"))));
    }
    MasterOptions::new(&values).map(|options| MasterInvocation::Serve(Box::new(options)))
}

/// Names of the environment variables for flags.
#[must_use]
pub fn variables() -> Vec<String> {
    table::FLAGS.iter().map(FlagDefinition::variable).collect()
}

/// The flag with this name. Dashes count as underscores.
fn find(name: &str) -> Option<&'static FlagDefinition> {
    let same = |flag: &&FlagDefinition| {
        flag.name.len() == name.len()
            && flag
                .name
                .bytes()
                .zip(name.bytes())
                .all(|(one, other)| one == other || (one == b'_' && other == b'-'))
    };
    table::FLAGS.iter().find(same)
}

fn nearest(name: &str) -> Option<&'static str> {
    let name = name.replace('-', "_");
    let candidates = table::FLAGS.iter().map(|flag| (strsim::jaro(flag.name, &name), flag.name));
    let candidates = candidates.filter(|(similarity, _)| *similarity >= MIN_SIMILARITY);
    candidates.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, name)| name)
}

impl FlagValues {
    fn set(
        &mut self,
        flag: &'static FlagDefinition,
        value: &str,
        source: FlagSource,
        source_name: &str,
    ) -> Result<(), FlagError> {
        if !flag.kind.accepts(value) {
            let (source_name, value) = (source_name.to_owned(), value.to_owned());
            let expected = flag.kind.to_string();
            return Err(FlagError::Value { source_name, name: flag.name, value, expected });
        }
        let is_overridden = self.values.get(flag.name).is_some_and(|(_, existing)| *existing > source);
        if !is_overridden {
            self.values.insert(flag.name, (value.to_owned(), source));
        }
        Ok(())
    }

    /// The value of a flag of the table.
    fn text(&self, name: &str) -> &str {
        match self.values.get(name) {
            Some((value, _)) => value,
            None => find(name).map_or("", |flag| flag.default),
        }
    }

    fn is_on(&self, name: &str) -> bool {
        flag::parse_bool(self.text(name)).unwrap_or_default()
    }
}
