//! Blobs as files of a folder.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;

use super::{BlobStore, BlobWriter, StorageError};

/// Folder of unfinished blobs.
const UNFINISHED: &str = "unfinished";
const LOCK: &str = "lock";

/// A folder with a folder per group. Only one process may use it at a time.
#[derive(Debug, Clone)]
pub struct FolderStore {
    inner: Arc<LockedFolder>,
}

#[derive(Debug)]
struct LockedFolder {
    root: PathBuf,
    next_unfinished: AtomicU64,
    /// Locked until the process ends.
    _lock: File,
}

/// A file that does not have its name yet.
struct UnfinishedFile {
    path: PathBuf,
    file: File,
    is_renamed: bool,
}

struct FolderWriter {
    key: String,
    target: PathBuf,
    unfinished: Option<UnfinishedFile>,
}

impl FolderStore {
    /// Creates the folder if necessary, locks it, and removes unfinished blobs.
    ///
    /// # Errors
    /// [`StorageError`] if the folder cannot be written, or is used by another process.
    pub fn open(root: &Path) -> Result<Self, StorageError> {
        let name = root.display().to_string();
        let open = || -> io::Result<File> {
            // Prompts and responses are for this user only.
            fs::DirBuilder::new().recursive(true).mode(0o700).create(root)?;
            let lock = File::options().create(true).truncate(false).write(true).open(root.join(LOCK))?;
            Ok(lock)
        };
        let lock = open().map_err(|source| StorageError::Io { key: name.clone(), source })?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(StorageError::Locked(name)),
            Err(fs::TryLockError::Error(source)) => return Err(StorageError::Io { key: name, source }),
        }
        let clean = || -> io::Result<()> {
            let unfinished = root.join(UNFINISHED);
            fs::create_dir_all(&unfinished)?;
            for entry in fs::read_dir(&unfinished)? {
                fs::remove_file(entry?.path())?;
            }
            Ok(())
        };
        clean().map_err(|source| StorageError::Io { key: name, source })?;
        let inner = LockedFolder { root: root.to_owned(), next_unfinished: AtomicU64::new(0), _lock: lock };
        Ok(Self { inner: Arc::new(inner) })
    }
}

impl LockedFolder {
    fn path(&self, key: &str) -> io::Result<PathBuf> {
        let is_plain = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
        };
        if key.split('/').count() > 2 || !key.split('/').all(is_plain) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "invalid key"));
        }
        Ok(self.root.join(key))
    }

    fn create(&self) -> io::Result<UnfinishedFile> {
        let number = self.next_unfinished.fetch_add(1, Ordering::Relaxed);
        let path = self.root.join(UNFINISHED).join(number.to_string());
        let file = File::create(&path)?;
        Ok(UnfinishedFile { path, file, is_renamed: false })
    }

    fn put(&self, key: &str, content: &[u8]) -> io::Result<()> {
        let target = self.path(key)?;
        let mut unfinished = self.create()?;
        unfinished.file.write_all(content)?;
        unfinished.commit(&target)
    }

    fn read(&self, key: &str, offset: u64, limit: usize) -> io::Result<Bytes> {
        let mut file = File::open(self.path(key)?)?;
        file.seek(SeekFrom::Start(offset))?;
        let available = file.metadata()?.len().saturating_sub(offset);
        let limit = usize::try_from(available).unwrap_or(usize::MAX).min(limit);
        let mut content = vec![0; limit];
        file.read_exact(&mut content)?;
        Ok(content.into())
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        let path = self.path(key)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) => sync_folder_of(&path),
        }
    }

    fn list(&self, group: &str) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(self.path(group)?) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }
}

impl UnfinishedFile {
    /// Makes the content durable before the name, and the name before the return.
    fn commit(mut self, target: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        let folder = target.parent().unwrap_or(target);
        if !folder.exists() {
            fs::create_dir_all(folder)?;
            sync_folder_of(folder)?;
        }
        fs::rename(&self.path, target)?;
        self.is_renamed = true;
        sync_folder_of(target)
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if !self.is_renamed
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(%error, "an unfinished file is left until the next start");
        }
    }
}

fn sync_folder_of(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// Runs blocking file operations on another thread.
async fn blocking<T: Send + 'static>(
    key: &str,
    operation: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, StorageError> {
    let done = tokio::task::spawn_blocking(operation).await;
    done.map_err(io::Error::other).flatten().map_err(|error| StorageError::io(key, error))
}

#[async_trait]
impl BlobStore for FolderStore {
    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        let (folder, name) = (self.inner.clone(), key.to_owned());
        blocking(key, move || folder.put(&name, &content)).await
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn BlobWriter>, StorageError> {
        let (folder, name) = (self.inner.clone(), key.to_owned());
        let (target, unfinished) = blocking(key, move || Ok((folder.path(&name)?, folder.create()?))).await?;
        Ok(Box::new(FolderWriter { key: key.to_owned(), target, unfinished: Some(unfinished) }))
    }

    async fn read(&self, key: &str, offset: u64, limit: usize) -> Result<Bytes, StorageError> {
        let (folder, name) = (self.inner.clone(), key.to_owned());
        blocking(key, move || folder.read(&name, offset, limit)).await
    }

    async fn delete(&self, key: &str) -> Result<(), StorageError> {
        let (folder, name) = (self.inner.clone(), key.to_owned());
        blocking(key, move || folder.delete(&name)).await
    }

    async fn list(&self, group: &str) -> Result<Vec<String>, StorageError> {
        let (folder, name) = (self.inner.clone(), group.to_owned());
        blocking(group, move || folder.list(&name)).await
    }
}

impl FolderWriter {
    fn abandoned(&self) -> StorageError {
        let source = io::Error::other("an earlier write failed");
        StorageError::Io { key: self.key.clone(), source }
    }
}

#[async_trait]
impl BlobWriter for FolderWriter {
    async fn write(&mut self, part: Bytes) -> Result<(), StorageError> {
        let mut unfinished = self.unfinished.take().ok_or_else(|| self.abandoned())?;
        let write = move || unfinished.file.write_all(&part).map(|()| unfinished);
        self.unfinished = Some(blocking(&self.key, write).await?);
        Ok(())
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StorageError> {
        let unfinished = self.unfinished.take().ok_or_else(|| self.abandoned())?;
        let target = self.target.clone();
        blocking(&self.key, move || unfinished.commit(&target)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn blobs_are_replaced_listed_and_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::open(folder.path()).unwrap();
        assert!(store.list("files").await.unwrap().is_empty());
        assert!(matches!(store.read("files/a", 0, 9).await, Err(StorageError::NotFound(_))));
        store.put("files/a", Bytes::from_static(b"first")).await.unwrap();
        store.put("files/a", Bytes::from_static(b"second")).await.unwrap();
        assert_eq!(store.read("files/a", 0, 99).await.unwrap(), "second");
        assert_eq!(store.read("files/a", 3, 2).await.unwrap(), "on");
        assert_eq!(store.read("files/a", 60, 2).await.unwrap(), "");

        let mut writer = store.begin("files/b").await.unwrap();
        writer.write(Bytes::from_static(b"in ")).await.unwrap();
        assert_eq!(store.list("files").await.unwrap(), ["a"]);
        writer.write(Bytes::from_static(b"parts")).await.unwrap();
        writer.commit().await.unwrap();
        assert_eq!(store.read("files/b", 0, 99).await.unwrap(), "in parts");
        drop(store.begin("files/c").await.unwrap());
        store.delete("files/a").await.unwrap();
        store.delete("files/a").await.unwrap();
        assert_eq!(store.list("files").await.unwrap(), ["b"]);
        assert_eq!(fs::read_dir(folder.path().join(UNFINISHED)).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn keys_cannot_leave_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::open(folder.path()).unwrap();
        for key in ["", "/a", "a/", "../a", "a/..", "a/b/c", "a/.b", "a\\b", "a/b c"] {
            assert!(store.put(key, Bytes::new()).await.is_err(), "{key}");
            assert!(store.read(key, 0, 1).await.is_err(), "{key}");
        }
    }

    #[test]
    fn one_process_uses_a_folder_and_starts_clean() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::open(folder.path()).unwrap();
        assert!(matches!(FolderStore::open(folder.path()), Err(StorageError::Locked(_))));
        drop(store);
        fs::write(folder.path().join(UNFINISHED).join("0"), "torn").unwrap();
        drop(FolderStore::open(folder.path()).unwrap());
        assert_eq!(fs::read_dir(folder.path().join(UNFINISHED)).unwrap().count(), 0);
    }
}
