//! Settings of model aliases.

use std::path::PathBuf;

use clap::Args;

use super::alias_table::AliasFileError;
use super::{FLAG, ModelAliases};

/// Names of models for clients.
#[derive(Debug, Clone, Args)]
pub struct ModelAliasOptions {
    /// TOML file with model aliases: names for clients that stand for one or more models, with weights and fallbacks; reloaded on
    /// change.
    #[arg(long, value_name = "FILE", env = "MOONGATE_MODEL_ALIAS_FILE")]
    pub model_alias_file: Option<PathBuf>,
}

/// A file of model aliases that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{FLAG} {}: {source}", path.display())]
pub struct ModelAliasFileError {
    pub(super) path: PathBuf,
    pub(super) source: AliasFileError,
}

impl ModelAliasOptions {
    /// Files that are reloaded on change.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        self.model_alias_file.iter().cloned().collect()
    }

    /// Checks that the file can be used.
    ///
    /// # Errors
    ///
    /// [`ModelAliasFileError`] if it cannot be read, or is invalid.
    pub fn check(&self) -> Result<(), ModelAliasFileError> {
        ModelAliases::load(self).map(drop)
    }
}
