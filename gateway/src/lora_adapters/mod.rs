//! LoRA adapters that engines can load at run time: those of a file. Adapters that engines list are models like others.

mod load_error;
mod options;
mod table;

use std::path::PathBuf;
use std::sync::Arc;

use moongate_runtime::FileChangeWatcher;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(crate) use load_error::AdapterLoadError;
pub use options::{LoraAdapterFileError, LoraAdapterOptions};
pub use table::{AdapterError, AdapterFileError};
pub(crate) use table::{AdapterTable, LoadableAdapter};

use crate::reloadable_file::ReloadableFile;

const FLAG: &str = "--lora-adapter-file";

/// The adapters of the file, reloaded when it changes.
#[derive(Debug)]
pub(crate) struct LoraAdapterFile {
    file: Option<ReloadableFile<AdapterTable, AdapterFileError>>,
    /// Notified of every valid reload.
    reloads: watch::Sender<()>,
}

impl LoraAdapterFile {
    /// Reads the file of `options`.
    pub(crate) fn load(options: &LoraAdapterOptions) -> Result<Self, LoraAdapterFileError> {
        let load = |path: &PathBuf| {
            ReloadableFile::load(FLAG, path, AdapterTable::read)
                .map_err(|source| LoraAdapterFileError { path: path.clone(), source })
        };
        let file = options.lora_adapter_file.as_ref().map(load).transpose()?;
        Ok(Self { file, reloads: watch::Sender::new(()) })
    }

    pub(crate) fn current(&self) -> Arc<AdapterTable> {
        self.file.as_ref().map(|file| file.current().clone()).unwrap_or_default()
    }

    /// Notifies of every valid reload.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.reloads.subscribe()
    }

    /// Reloads the file when it changes, and reports whether it was valid. `changes` must have been created before the file was read.
    pub(crate) async fn watch_file(
        self: Arc<Self>,
        reloaded: impl Fn(bool),
        changes: FileChangeWatcher,
        stop: CancellationToken,
    ) {
        let reload = || {
            if let Some(file) = &self.file {
                let is_valid = file.reload(AdapterTable::len);
                reloaded(is_valid);
                if is_valid {
                    self.reloads.send_replace(());
                }
            }
        };
        changes.watch(stop, reload).await;
    }
}
