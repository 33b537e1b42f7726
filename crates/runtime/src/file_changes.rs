//! Notices that small files have other content than before: keys and certificates that are renewed while the process runs.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::PathBuf;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Between two looks. Comparing content works for files that are written, renamed, or, in a mounted Secret, swapped by a symbolic
/// link, on every file system.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Files, and what they held when they were last looked at.
#[derive(Debug, Clone)]
pub struct FileChangeWatcher {
    files: Vec<PathBuf>,
    last_fingerprint: u64,
}

impl FileChangeWatcher {
    /// Remembers what the files hold now. Make it before the files are read, so that no change falls between.
    #[must_use]
    pub fn new(files: Vec<PathBuf>) -> Self {
        let last_fingerprint = fingerprint(&files);
        Self { files, last_fingerprint }
    }

    /// Calls `changed` after every change of any of the files, until `stop`.
    pub async fn watch(mut self, stop: CancellationToken, mut changed: impl FnMut()) {
        while stop.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await.is_some() {
            let now = fingerprint(&self.files);
            if std::mem::replace(&mut self.last_fingerprint, now) != now {
                changed();
            }
        }
    }
}

/// Of the content of all files; one that cannot be read counts as such. They are small and on a local disk or in memory.
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
    async fn a_change_is_told_and_silence_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        std::fs::write(&one, "1").unwrap();
        let changes = FileChangeWatcher::new(vec![one.clone(), other.clone()]);
        let (stop, told) = (CancellationToken::new(), Arc::new(Notify::new()));
        let tell = told.clone();
        let supervisor = Supervisor::new();
        let following = supervisor.spawn("follow", changes.watch(stop.clone(), move || tell.notify_one()));
        let quiet = tokio::time::timeout(POLL_INTERVAL * 5, told.notified()).await;
        assert!(quiet.is_err(), "nothing has changed");
        for (file, text) in [(&one, "2"), (&other, "new")] {
            std::fs::write(file, text).unwrap();
            tokio::time::timeout(POLL_INTERVAL * 5, told.notified()).await.unwrap();
        }
        std::fs::remove_file(&one).unwrap();
        tokio::time::timeout(POLL_INTERVAL * 5, told.notified()).await.unwrap();
        stop.cancel();
        following.await.unwrap();
    }
}
