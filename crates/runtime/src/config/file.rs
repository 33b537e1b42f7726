//! Reads the config file as keys with line numbers.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::ConfigError;

/// Larger than any hand-written file; a wrong path must not exhaust memory.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// One key of the file with its value.
pub(super) struct ConfigFileEntry {
    pub(super) key: String,
    /// Line number, counted from 1.
    pub(super) line: usize,
    pub(super) value: ConfigFileValue,
}

pub(super) enum ConfigFileValue {
    Text(String),
    /// Decimal digits, as in a flag's value.
    Number(String),
    Bool(bool),
    Array(Vec<ConfigFileValue>),
    Table,
    /// A date or time, which no setting accepts.
    Other,
}

impl ConfigFileValue {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Number(_) => "a number",
            Self::Bool(_) => "a boolean",
            Self::Array(_) => "an array",
            Self::Table => "a table",
            Self::Other => "a date or time",
        }
    }

    fn from_toml(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) => Self::Text(text.to_string()),
            DeValue::Integer(number) => Self::Number(
                i128::from_str_radix(number.as_str(), number.radix())
                    .map_or_else(|_| number.as_str().to_owned(), |number| number.to_string()),
            ),
            DeValue::Float(number) => Self::Number(number.as_str().to_owned()),
            DeValue::Boolean(on) => Self::Bool(*on),
            DeValue::Array(values) => {
                Self::Array(values.iter().map(|value| Self::from_toml(value.get_ref())).collect())
            }
            DeValue::Table(_) => Self::Table,
            DeValue::Datetime(_) => Self::Other,
        }
    }
}

/// Reads the entries of a file, in file order.
pub(super) fn read(path: &Path) -> Result<Vec<ConfigFileEntry>, ConfigError> {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| {
            if file.metadata()?.len() > MAX_FILE_BYTES {
                return Err(std::io::Error::other(format!("larger than {MAX_FILE_BYTES} bytes")));
            }
            file.take(MAX_FILE_BYTES).read_to_string(&mut text)
        })
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let table =
        DeTable::parse(&text).map_err(|error| ConfigError::Syntax { path: path.to_owned(), error })?;
    let mut entries: Vec<(usize, ConfigFileEntry)> = table
        .get_ref()
        .iter()
        .map(|(key, value)| {
            let offset = key.span().start;
            let line = 1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count();
            (
                offset,
                ConfigFileEntry {
                    key: key.get_ref().to_string(),
                    line,
                    value: ConfigFileValue::from_toml(value.get_ref()),
                },
            )
        })
        .collect();
    entries.sort_by_key(|(offset, _)| *offset);
    Ok(entries.into_iter().map(|(_, entry)| entry).collect())
}
