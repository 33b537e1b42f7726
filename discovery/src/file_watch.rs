//! Watches a small file that is replaced by writing, by rename, or, in a ConfigMap mount, by swapping a symbolic link.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecursiveMode, Watcher};
use tokio::io::AsyncReadExt;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::TopologyFileError;

/// Largest accepted topology file, in bytes; a ConfigMap cannot be larger.
const MAX_FILE: u64 = 1 << 20;
/// Delay between a file event and the read: a non-atomic write causes several events.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Interval of comparisons without events: network file systems and exhausted inotify limits deliver none.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Watches the directory of a file and returns the file's text when it has changed.
pub(crate) struct TopologyFileWatcher {
    path: PathBuf,
    last: Option<Result<String, TopologyFileError>>,
    wake: Arc<Notify>,
    watcher: Option<notify::RecommendedWatcher>,
    next_poll: Instant,
    /// Whether an event has arrived since the last read; kept when a wait is cancelled.
    dirty: bool,
}

impl TopologyFileWatcher {
    pub(crate) fn new(path: &Path) -> Self {
        let wake = Arc::new(Notify::new());
        let watcher = watch_directory(path, wake.clone())
            .inspect_err(|error| {
                tracing::warn!(
                    file = %path.display(),
                    %error,
                    poll_s = POLL_INTERVAL.as_secs(),
                    "file events are not available; polling the file instead"
                );
            })
            .ok();
        Self {
            path: path.to_owned(),
            last: None,
            wake,
            watcher,
            next_poll: Instant::now() + POLL_INTERVAL,
            dirty: false,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Logs that the content of the file was rejected.
    pub(crate) fn log_rejected(&self, error: &TopologyFileError) {
        tracing::error!(
            file = %self.path.display(),
            %error,
            "topology file rejected; keeping the last valid version; fix the file; it is reloaded automatically"
        );
    }

    /// Reads the file immediately, and remembers the result for [`Self::changed`].
    pub(crate) async fn read(&mut self) -> Result<String, TopologyFileError> {
        let read = read_bounded(&self.path).await;
        self.last = Some(read.clone());
        read
    }

    /// Waits until a read has a different result: another text, or another error. Cancel-safe.
    pub(crate) async fn changed(&mut self) -> Result<String, TopologyFileError> {
        loop {
            if !self.dirty {
                let _ = tokio::time::timeout_at(self.next_poll, self.wake.notified()).await;
                self.dirty = true;
            }
            tokio::time::sleep(DEBOUNCE).await;
            if self.watcher.is_none() {
                self.watcher = watch_directory(&self.path, self.wake.clone()).ok();
            }
            let read = read_bounded(&self.path).await;
            self.next_poll = Instant::now() + POLL_INTERVAL;
            self.dirty = false;
            if self.last.as_ref() != Some(&read) {
                self.last = Some(read.clone());
                return read;
            }
        }
    }
}

fn watch_directory(path: &Path, wake: Arc<Notify>) -> notify::Result<notify::RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Our own reads cause access events too.
        let is_read = matches!(&event, Ok(event) if matches!(event.kind,
            EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write)));
        if !is_read {
            wake.notify_one();
        }
    })?;
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    watcher.watch(directory, RecursiveMode::NonRecursive)?;
    Ok(watcher)
}

async fn read_bounded(path: &Path) -> Result<String, TopologyFileError> {
    let read = async {
        let mut bytes = Vec::new();
        tokio::fs::File::open(path).await?.take(MAX_FILE + 1).read_to_end(&mut bytes).await?;
        Ok::<_, std::io::Error>(bytes)
    };
    let bytes = read.await.map_err(|error| TopologyFileError::Read(error.to_string()))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(TopologyFileError::TooLarge(MAX_FILE));
    }
    String::from_utf8(bytes).map_err(|_| TopologyFileError::NotText)
}
