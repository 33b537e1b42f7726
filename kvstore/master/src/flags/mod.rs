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

pub use ha::{Backend, HaFlags};
pub use options::{DataOptions, EventOptions, MasterOptions, MetadataOptions};

use flag::Flag;

/// Names that are offered instead of an unknown one are at least so similar (Jaro, 0 to 1).
const ALIKE: f64 = 0.75;

/// The command line, the environment or a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FlagError {
    /// No flag has that name.
    #[error("{source_name}: there is no flag --{name}{}", offer(.nearest.as_ref()))]
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
    Tls(#[from] moongate_runtime::TlsError),
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

fn offer(nearest: Option<&&'static str>) -> String {
    nearest.map_or_else(|| "; --help lists them".to_owned(), |name| format!("; did you mean --{name}?"))
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Asked {
    /// To serve.
    Serve(Box<MasterOptions>),
    /// To show text and end.
    Show(String),
}

/// Where a value comes from; later ones win.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    File,
    Environment,
    CommandLine,
}

/// The values that were given.
#[derive(Debug, Default)]
struct Values {
    given: BTreeMap<&'static str, (String, Origin)>,
    /// What was given to no flag, or to one of [`flag::Use::Nothing`] or [`flag::Use::Missing`].
    stray: Vec<String>,
}

/// Reads the command line, without the program's and the command's name.
///
/// # Errors
/// [`FlagError`].
pub fn read(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<Asked, FlagError> {
    let values = parse::parse(arguments, environment)?;
    for asks in ["help", "helpfull", "helpshort", "helppackage", "helpxml"] {
        if values.is_on(asks) {
            return Ok(Asked::Show(help::text()));
        }
    }
    if values.is_on("version") {
        return Ok(Asked::Show(format!("moongate master {}\n", env!("CARGO_PKG_VERSION"))));
    }
    MasterOptions::new(&values).map(|options| Asked::Serve(Box::new(options)))
}

/// Names of the environment variables that set flags.
#[must_use]
pub fn variables() -> Vec<String> {
    table::FLAGS.iter().map(Flag::variable).collect()
}

/// The flag of that name. Dashes in it are taken for underscores.
fn find(name: &str) -> Option<&'static Flag> {
    let same = |flag: &&Flag| {
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
    let alike = alike.filter(|(alike, _)| *alike >= ALIKE);
    alike.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, name)| name)
}

impl Values {
    fn set(
        &mut self,
        flag: &'static Flag,
        value: &str,
        origin: Origin,
        source_name: &str,
    ) -> Result<(), FlagError> {
        if let Err(expected) = flag.check(value) {
            let (source_name, value) = (source_name.to_owned(), value.to_owned());
            return Err(FlagError::Value { source_name, name: flag.name, value, expected });
        }
        let stronger = self.given.get(flag.name).is_some_and(|(_, before)| *before > origin);
        if !stronger {
            self.given.insert(flag.name, (value.to_owned(), origin));
        }
        Ok(())
    }

    /// The value of a flag of the table.
    fn text(&self, name: &str) -> &str {
        match self.given.get(name) {
            Some((value, _)) => value,
            None => find(name).map_or("", |flag| flag.default),
        }
    }

    fn is_on(&self, name: &str) -> bool {
        flag::switch(self.text(name)).unwrap_or_default()
    }
}
