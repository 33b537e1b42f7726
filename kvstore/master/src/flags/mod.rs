//! The command line of Mooncake's master, with flags of our own.
//!
//! A value comes from the command line (also through `--flagfile` and `--fromenv`), else from the environment
//! (`MOONGATE_` and the flag's name in capitals), else from the file that `--config_path` names, else it is the default.

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
use std::path::PathBuf;

pub use ha::{HaBackend, HaFlags};
pub use options::{DataDirOptions, KvEventFlags, MasterOptions, MetadataFlags};

use flag::FlagDefinition;

/// Names that are offered instead of an unknown one are at least so similar (Jaro, 0 to 1).
const MIN_SIMILARITY: f64 = 0.75;

/// The command line, the environment or a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FlagError {
    /// No flag has that name.
    #[error("{source_name}: there is no flag --{name}{}", suggestion(.nearest.as_ref()))]
    Unknown {
        /// Where it was given.
        source_name: String,
        /// As written.
        name: String,
        /// A name that may have been meant.
        nearest: Option<&'static str>,
    },
    /// A flag without a value.
    #[error("{source_name}: --{name} needs a value: --{name}=VALUE")]
    NoValue {
        /// Where it was given.
        source_name: String,
        /// The flag.
        name: &'static str,
    },
    /// Files for TLS with the store's other programs.
    #[error(transparent)]
    Tls(#[from] moongate_runtime::TlsConfigError),
    /// A value that the flag cannot have.
    #[error("{source_name}: --{name} cannot be `{value}`; it is {expected}")]
    Value {
        /// Where it was given.
        source_name: String,
        /// The flag.
        name: &'static str,
        /// As written.
        value: String,
        /// What it can be.
        expected: String,
    },
    /// Text that is not UTF-8.
    #[error("an argument is not UTF-8: {0:?}")]
    NotUtf8(OsString),
    /// A file that cannot be read.
    #[error("cannot read {}, which --{flag} names: {problem}", path.display())]
    File {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// What went wrong.
        problem: String,
    },
    /// A variable that `--fromenv` asks for and that is not there.
    #[error("--fromenv asks for {0}, which is not in the environment; set it, or use --tryfromenv")]
    NoVariable(String),
}

fn suggestion(nearest: Option<&&'static str>) -> String {
    nearest.map_or_else(|| "; --help lists them".to_owned(), |name| format!("; did you mean --{name}?"))
}

/// What the command line asks for.
#[derive(Debug)]
pub enum MasterInvocation {
    /// To serve.
    Serve(Box<MasterOptions>),
    /// To show text and end.
    PrintText(String),
}

/// Where a value comes from; later ones win.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FlagSource {
    File,
    Environment,
    CommandLine,
}

/// The values that were given.
#[derive(Debug, Default)]
struct FlagValues {
    values: BTreeMap<&'static str, (String, FlagSource)>,
    /// What was given to no flag, or to one of [`flag::FlagSupport::Nothing`] or [`flag::FlagSupport::Missing`].
    without_effect: Vec<String>,
}

/// Reads the command line, without the program's and the command's name.
///
/// # Errors
/// [`FlagError`].
pub fn read(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<MasterInvocation, FlagError> {
    let values = parse::parse(arguments, environment)?;
    for asks in ["help", "helpfull", "helpshort", "helppackage", "helpxml"] {
        if values.is_on(asks) {
            return Ok(MasterInvocation::PrintText(help::text()));
        }
    }
    if values.is_on("version") {
        return Ok(MasterInvocation::PrintText(format!("moongate master {}\n", env!("CARGO_PKG_VERSION"))));
    }
    MasterOptions::new(&values).map(|options| MasterInvocation::Serve(Box::new(options)))
}

/// Names of the environment variables that set flags.
#[must_use]
pub fn variables() -> Vec<String> {
    table::FLAGS.iter().map(FlagDefinition::variable).collect()
}

/// The flag of that name. Dashes in it are taken for underscores.
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
    let alike = table::FLAGS.iter().map(|flag| (strsim::jaro(flag.name, &name), flag.name));
    let alike = alike.filter(|(alike, _)| *alike >= MIN_SIMILARITY);
    alike.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, name)| name)
}

impl FlagValues {
    fn set(
        &mut self,
        flag: &'static FlagDefinition,
        value: &str,
        origin: FlagSource,
        source_name: &str,
    ) -> Result<(), FlagError> {
        if let Err(expected) = flag.check(value) {
            let (source_name, value) = (source_name.to_owned(), value.to_owned());
            return Err(FlagError::Value { source_name, name: flag.name, value, expected });
        }
        let stronger = self.values.get(flag.name).is_some_and(|(_, before)| *before > origin);
        if !stronger {
            self.values.insert(flag.name, (value.to_owned(), origin));
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
