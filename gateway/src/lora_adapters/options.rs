//! Settings of LoRA adapters that engines load at run time.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::table::AdapterFileError;
use super::{FLAG, LoraAdapterFile};

/// LoRA adapters that engines load at run time.
#[derive(Debug, Clone, Args)]
pub struct LoraAdapterOptions {
    /// TOML file with LoRA adapters: names, paths and base models. Engines load them when requests need them; reloaded on change.
    #[arg(long, value_name = "FILE", env = "MOONGATE_LORA_ADAPTER_FILE")]
    pub lora_adapter_file: Option<PathBuf>,

    /// Time limit for an engine to load a LoRA adapter. After it, requests for the adapter try another engine.
    #[arg(long, value_name = "TIME", env = "MOONGATE_LORA_LOAD_TIMEOUT", default_value = "60s", value_parser = humantime::parse_duration)]
    pub lora_load_timeout: Duration,
}

/// A file of LoRA adapters that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{FLAG} {}: {source}", path.display())]
pub struct LoraAdapterFileError {
    pub(super) path: PathBuf,
    pub(super) source: AdapterFileError,
}

impl LoraAdapterOptions {
    /// Files that are reloaded on change.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        self.lora_adapter_file.iter().cloned().collect()
    }

    /// Checks that the file can be used.
    ///
    /// # Errors
    ///
    /// [`LoraAdapterFileError`] if it cannot be read, or is invalid.
    pub fn check(&self) -> Result<(), LoraAdapterFileError> {
        LoraAdapterFile::load(self).map(drop)
    }
}
