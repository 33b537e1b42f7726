//! Blobs as objects of an S3-compatible store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::TryStreamExt as _;
use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{ClientOptions, MultipartUpload, ObjectStore, ObjectStoreExt as _, RetryConfig};
use tokio::time::timeout;

use super::lease::StoreLease;
use super::{BlobStore, BlobWriter, BucketPrefix, StorageError};

/// Larger blobs are uploaded in parts of this size. S3 requires at least 5 MiB and allows 10,000 parts.
const PART_BYTES: usize = 8 << 20;
/// Time limit of one HTTP request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Retries of one HTTP request, and the time after which there are no more.
const RETRIES: usize = 4;
const RETRY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of a change of what readers see. It is much shorter than the lease, so that no change of an owner takes effect
/// after the next owner has begun.
pub(super) const CHANGE_TIMEOUT: Duration = Duration::from_secs(6);

/// A prefix of a bucket, written only while this process holds its lease.
#[derive(Debug, Clone)]
pub struct BucketStore {
    objects: Arc<dyn ObjectStore>,
    prefix: String,
    lease: Arc<StoreLease>,
}

struct BucketWriter {
    store: BucketStore,
    key: String,
    path: Path,
    /// What is not uploaded yet, less than a part.
    buffer: BytesMut,
    /// `None` until the first part is full.
    upload: Option<Box<dyn MultipartUpload>>,
}

impl BucketStore {
    /// A client configured by the environment: `AWS_ACCESS_KEY_ID`, `AWS_REGION`, `AWS_ENDPOINT_URL` and so on. Sends nothing.
    ///
    /// # Errors
    /// [`StorageError`] if the settings in the environment are incomplete or invalid.
    pub fn connect(place: &BucketPrefix) -> Result<Self, StorageError> {
        let is_http = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]
            .iter()
            .find_map(|name| std::env::var(name).ok())
            .is_some_and(|url| url.starts_with("http://"));
        Self::build(AmazonS3Builder::from_env(), is_http, place)
    }

    pub(crate) fn build(
        builder: AmazonS3Builder,
        is_http: bool,
        place: &BucketPrefix,
    ) -> Result<Self, StorageError> {
        let client = ClientOptions::new()
            .with_timeout(REQUEST_TIMEOUT)
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_allow_http(is_http);
        let retry =
            RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        let objects = builder
            .with_bucket_name(&place.bucket)
            .with_client_options(client)
            .with_retry(retry)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            // Not all servers have the request that deletes several objects.
            .with_disable_bulk_delete(true)
            .build()
            .map_err(|error| StorageError::object(&place.to_string(), error))?;
        Ok(Self::new(Arc::new(objects), place))
    }

    pub(crate) fn new(objects: Arc<dyn ObjectStore>, place: &BucketPrefix) -> Self {
        let lease = Arc::new(StoreLease::new(objects.clone(), place));
        Self { objects, prefix: place.prefix.clone(), lease }
    }

    pub(crate) fn lease(&self) -> &Arc<StoreLease> {
        &self.lease
    }

    fn path(&self, key: &str) -> Result<Path, StorageError> {
        let is_plain = |part: &str| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
            !part.is_empty() && !part.starts_with('.') && part.bytes().all(is_plain)
        };
        if key.split('/').count() > 2 || !key.split('/').all(is_plain) {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "invalid key");
            return Err(StorageError::Io { key: key.to_owned(), source });
        }
        let full = if self.prefix.is_empty() { key.to_owned() } else { format!("{}/{key}", self.prefix) };
        Ok(Path::from(full))
    }

    /// Makes a change, if this process owns the prefix.
    async fn change<T>(
        &self,
        key: &str,
        change: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, StorageError> {
        self.lease.check()?;
        match timeout(CHANGE_TIMEOUT, change).await {
            Ok(changed) => changed.map_err(|error| StorageError::object(key, error)),
            Err(_) => Err(StorageError::Timeout { key: key.to_owned(), limit: CHANGE_TIMEOUT }),
        }
    }

    /// The length of a blob.
    async fn len(&self, key: &str, path: &Path) -> Result<u64, StorageError> {
        Ok(self.objects.head(path).await.map_err(|error| StorageError::object(key, error))?.size)
    }
}

#[async_trait]
impl BlobStore for BucketStore {
    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        if content.len() > PART_BYTES {
            let mut writer = self.begin(key).await?;
            writer.write(content).await?;
            return writer.commit().await;
        }
        let path = self.path(key)?;
        self.change(key, self.objects.put(&path, content.into())).await.map(drop)
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn BlobWriter>, StorageError> {
        let path = self.path(key)?;
        let writer = BucketWriter {
            store: self.clone(),
            key: key.to_owned(),
            path,
            buffer: BytesMut::new(),
            upload: None,
        };
        Ok(Box::new(writer))
    }

    async fn read(&self, key: &str, offset: u64, limit: usize) -> Result<Bytes, StorageError> {
        if limit == 0 {
            return Ok(Bytes::new());
        }
        let path = self.path(key)?;
        match self.objects.get_range(&path, offset..offset.saturating_add(limit as u64)).await {
            Ok(content) => Ok(content),
            Err(error @ object_store::Error::NotFound { .. }) => Err(StorageError::object(key, error)),
            // A range after the end is an error of its own in S3.
            Err(error) if self.len(key, &path).await? > offset => Err(StorageError::object(key, error)),
            Err(_) => Ok(Bytes::new()),
        }
    }

    async fn delete(&self, key: &str) -> Result<(), StorageError> {
        let path = self.path(key)?;
        match self.change(key, self.objects.delete(&path)).await {
            Err(StorageError::NotFound(_)) => Ok(()),
            deleted => deleted,
        }
    }

    async fn list(&self, group: &str) -> Result<Vec<String>, StorageError> {
        let path = self.path(group)?;
        let names = self.objects.list(Some(&path)).try_filter_map(|object| {
            let name = object.location.prefix_match(&path).and_then(|mut parts| {
                let name = parts.next()?.as_ref().to_owned();
                parts.next().is_none().then_some(name)
            });
            std::future::ready(Ok(name))
        });
        names.try_collect().await.map_err(|error| StorageError::object(group, error))
    }
}

impl BucketWriter {
    /// Uploads a part. Parts are invisible until the upload is completed, so they need no lease.
    async fn upload(&mut self, part: Bytes) -> Result<(), StorageError> {
        let error = |error| StorageError::object(&self.key, error);
        let upload = match &mut self.upload {
            Some(upload) => upload,
            empty => {
                self.store.lease.check()?;
                empty.insert(self.store.objects.put_multipart(&self.path).await.map_err(error)?)
            }
        };
        upload.put_part(part.into()).await.map_err(error)
    }
}

#[async_trait]
impl BlobWriter for BucketWriter {
    async fn write(&mut self, mut part: Bytes) -> Result<(), StorageError> {
        while self.buffer.len() + part.len() > PART_BYTES {
            let more = part.split_to(PART_BYTES - self.buffer.len());
            let full = if self.buffer.is_empty() {
                more
            } else {
                self.buffer.extend_from_slice(&more);
                self.buffer.split().freeze()
            };
            self.upload(full).await?;
        }
        self.buffer.extend_from_slice(&part);
        Ok(())
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StorageError> {
        let rest = self.buffer.split().freeze();
        if self.upload.is_none() {
            return self.store.put(&self.key, rest).await;
        }
        if !rest.is_empty() {
            self.upload(rest).await?;
        }
        if let Some(mut upload) = self.upload.take() {
            self.store.change(&self.key, upload.complete()).await?;
        }
        Ok(())
    }
}

impl Drop for BucketWriter {
    /// Removes the parts of an upload that is not completed. After a crash, a lifecycle rule of the bucket has to.
    fn drop(&mut self) {
        let (Some(mut upload), Ok(runtime)) = (self.upload.take(), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        let key = self.key.clone();
        runtime.spawn(async move {
            if let Err(error) = upload.abort().await {
                tracing::debug!(key, %error, "the parts of an unfinished upload are left in the bucket");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use moongate_testkit::S3Server;

    use super::*;
    use crate::crash_tests::served;

    #[tokio::test]
    async fn blobs_are_replaced_listed_and_deleted() {
        let server = S3Server::start().unwrap();
        let store = served(&server, "a/b");
        let put = store.put("files/a", Bytes::from_static(b"first")).await;
        assert!(matches!(put, Err(StorageError::LeaseLost(_))), "{put:?}");
        assert!(store.lease.try_acquire().await.unwrap());
        assert!(store.list("files").await.unwrap().is_empty());
        assert!(matches!(store.read("files/a", 0, 9).await, Err(StorageError::NotFound(_))));
        store.put("files/a", Bytes::from_static(b"first")).await.unwrap();
        store.put("files/a", Bytes::from_static(b"second")).await.unwrap();
        assert_eq!(store.read("files/a", 0, usize::MAX).await.unwrap(), "second");
        assert_eq!(store.read("files/a", 3, 2).await.unwrap(), "on");
        assert_eq!(store.read("files/a", 6, 2).await.unwrap(), "");
        assert_eq!(store.read("files/a", 60, 2).await.unwrap(), "");
        let mut writer = store.begin("files/b").await.unwrap();
        writer.write(Bytes::from_static(b"in ")).await.unwrap();
        assert_eq!(store.list("files").await.unwrap(), ["a"]);
        writer.write(Bytes::from_static(b"parts")).await.unwrap();
        writer.commit().await.unwrap();
        assert_eq!(store.read("files/b", 0, 99).await.unwrap(), "in parts");
        store.delete("files/a").await.unwrap();
        store.delete("files/a").await.unwrap();
        assert_eq!(store.list("files").await.unwrap(), ["b"]);
        for key in ["", "/a", "a/", "../a", "a/..", "a/b/c", "a/.b", "a\\b", "a/b c"] {
            assert!(store.put(key, Bytes::new()).await.is_err(), "{key}");
            assert!(store.read(key, 0, 1).await.is_err(), "{key}");
        }
    }

    #[tokio::test]
    async fn large_blobs_are_uploaded_in_parts() {
        let server = S3Server::start().unwrap();
        let store = served(&server, "");
        assert!(store.lease.try_acquire().await.unwrap());
        let large: Bytes = (0..2 * PART_BYTES + 5).map(|byte| byte as u8 ^ (byte >> 11) as u8).collect();
        store.put("files/a", large.clone()).await.unwrap();
        assert!(store.read("files/a", 0, usize::MAX).await.unwrap() == large);
        let mut writer = store.begin("files/b").await.unwrap();
        for part in large.chunks(3 << 20) {
            writer.write(Bytes::copy_from_slice(part)).await.unwrap();
        }
        assert_eq!(store.list("files").await.unwrap(), ["a"], "invisible until it is complete");
        writer.commit().await.unwrap();
        assert!(store.read("files/b", 0, usize::MAX).await.unwrap() == large);
        let end = store.read("files/b", 2 * PART_BYTES as u64, 99).await.unwrap();
        assert_eq!(end, large.slice(2 * PART_BYTES..));
        let mut lost = store.begin("files/c").await.unwrap();
        lost.write(large).await.unwrap();
        store.lease.release().await;
        assert!(matches!(lost.commit().await, Err(StorageError::LeaseLost(_))));
        assert_eq!(store.list("files").await.unwrap().len(), 2);
    }

    #[tokio::test]
    async fn a_missing_bucket_and_a_dead_server_are_distinguished() {
        let server = S3Server::start().unwrap();
        let place = BucketPrefix { bucket: "missing".to_owned(), prefix: String::new() };
        let builder = AmazonS3Builder::new()
            .with_endpoint(server.url())
            .with_access_key_id("test")
            .with_secret_access_key("test");
        let store = BucketStore::build(builder.clone(), true, &place).unwrap();
        let error = store.lease.try_acquire().await.unwrap_err();
        assert!(error.is_misconfigured() && error.to_string().contains("s3://missing/"), "{error}");
        drop(server);
        let error = store.lease.try_acquire().await.unwrap_err();
        assert!(!error.is_misconfigured(), "{error}");
    }
}
