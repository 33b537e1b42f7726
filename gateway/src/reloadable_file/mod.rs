//! Small files that are reloaded when they change.

mod bounded;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;

pub use bounded::BoundedReadError;
pub(crate) use bounded::read_limited;

/// A parsed file that is reloaded when it changes.
pub(crate) struct ReloadableFile<T, E> {
    flag: &'static str,
    path: PathBuf,
    read: fn(&Path) -> Result<T, E>,
    current: ArcSwap<T>,
}

impl<T, E: std::error::Error> ReloadableFile<T, E> {
    /// Reads the file that is the value of `flag`.
    pub(crate) fn load(flag: &'static str, path: &Path, read: fn(&Path) -> Result<T, E>) -> Result<Self, E> {
        let current = ArcSwap::from_pointee(read(path)?);
        Ok(Self { flag, path: path.to_owned(), read, current })
    }

    /// The latest valid content.
    pub(crate) fn current(&self) -> arc_swap::Guard<Arc<T>> {
        self.current.load()
    }

    /// Reloads the file, and returns whether it is valid. An invalid file keeps the previous content, so that an editing mistake
    /// locks no client out. `count` is the number of entries, for the log.
    pub(crate) fn reload(&self, count: impl Fn(&T) -> usize) -> bool {
        let (flag, file) = (self.flag, self.path.display());
        match (self.read)(&self.path) {
            Ok(value) => {
                tracing::info!(flag, %file, entries = count(&value), "reloaded");
                self.current.store(Arc::new(value));
                true
            }
            Err(problem) => {
                tracing::warn!(flag, %file, %problem, "reload failed; keeping the previous content");
                false
            }
        }
    }
}

impl<T, E> std::fmt::Debug for ReloadableFile<T, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReloadableFile").field("path", &self.path).finish_non_exhaustive()
    }
}
