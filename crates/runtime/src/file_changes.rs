//! Detects content changes of small files: keys and certificates renewed at run time.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::PathBuf;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Poll interval. Comparing content works for files that are overwritten, renamed, or, in a mounted Secret, swapped by a symbolic link, on
/// every file system.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Watched files and the hash of their last content.
#[derive(Debug, Clone)]
pub struct FileChangeWatcher {
    files: Vec<PathBuf>,
    last_fingerprint: u64,
}

impl FileChangeWatcher {
    /// Records the current content. Create it before reading the files, so that no change is missed.
    #[must_use]
    pub fn new(files: Vec<PathBuf>) -> Self {
        let last_fingerprint = fingerprint(&files);
        Self { files, last_fingerprint }
    }

    /// Calls `changed` after every change of any file, until `stop`.
    pub async fn watch(mut self, stop: CancellationToken, mut changed: impl FnMut()) {
        while stop.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await.is_some() {
            let current = fingerprint(&self.files);
            if std::mem::replace(&mut self.last_fingerprint, current) != current {
                changed();
            }
        }
    }
}

/// Hash of all files' content or error kind. The files are small and on a local disk or in memory.
fn fingerprint(files: &[PathBuf]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for file in files {
        std::fs::read(file).map_err(|error| error.kind()).hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::Notify;

    use super::*;
    use crate::Supervisor;

    #[tokio::test(start_paused = true)]
    async fn each_change_is_reported_once() {
        let folder = tempfile::tempdir().unwrap();
        let (first, other) = (folder.path().join("first"), folder.path().join("other"));
        std::fs::write(&first, "1").unwrap();
        let changes = FileChangeWatcher::new(vec![first.clone(), other.clone()]);
        let (stop, notify) = (CancellationToken::new(), Arc::new(Notify::new()));
        let notifier = notify.clone();
        let supervisor = Supervisor::new();
        let watching = supervisor.spawn("follow", changes.watch(stop.clone(), move || notifier.notify_one()));
        let quiet = tokio::time::timeout(POLL_INTERVAL * 5, notify.notified()).await;
        assert!(quiet.is_err(), "nothing has changed");
        for (file, text) in [(&first, "2"), (&other, "new")] {
            std::fs::write(file, text).unwrap();
            tokio::time::timeout(POLL_INTERVAL * 5, notify.notified()).await.unwrap();
        }
        std::fs::remove_file(&first).unwrap();
        tokio::time::timeout(POLL_INTERVAL * 5, notify.notified()).await.unwrap();
        stop.cancel();
        watching.await.unwrap();
    }
}
