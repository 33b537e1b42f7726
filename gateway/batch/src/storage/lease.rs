//! Ownership of a bucket's prefix: one object, which is replaced only if it is the one that was read.
//!
//! The owner replaces it every few seconds. Another process takes it over once it has seen the same version for longer than the
//! owner may go without a renewal. Only durations are compared, so clocks need not agree.

use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload, UpdateVersion};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::bucket::CHANGE_TIMEOUT;
use super::{BucketPrefix, StorageError};

/// A version that has not changed for this time belongs to no one.
pub(crate) const LEASE_DURATION: Duration = Duration::from_secs(20);
/// For this time after a renewal was sent, its owner may begin changes, each of which ends within [`CHANGE_TIMEOUT`].
const OWNED_DURATION: Duration = Duration::from_secs(LEASE_DURATION.as_secs() - CHANGE_TIMEOUT.as_secs());
const RENEW_INTERVAL: Duration = Duration::from_secs(3);
/// Pause after a renewal that failed, and between two looks at another owner's lease.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Name of the object with the owner.
const OWNER: &str = "owner";

/// Content of the object.
#[derive(Debug, Serialize, Deserialize)]
struct OwnerRecord {
    owner: String,
    /// Makes the content, and with it the ETag, different at every renewal.
    renewal: u64,
    /// The owner has ended, and nothing of it is running.
    released: bool,
}

/// The right to change the objects below a prefix.
#[derive(Debug)]
pub(crate) struct StoreLease {
    objects: Arc<dyn ObjectStore>,
    path: Path,
    /// For messages.
    place: String,
    /// Random name of this process.
    owner: String,
    state: Mutex<LeaseState>,
}

#[derive(Debug, Default)]
struct LeaseState {
    /// Version of the object that this process wrote last.
    version: Option<UpdateVersion>,
    renewals: u64,
    /// `None` without the lease.
    owned_until: Option<Instant>,
    /// Version of another owner, and since when it is unchanged.
    seen: Option<(Option<String>, Instant)>,
}

impl StoreLease {
    pub(crate) fn new(objects: Arc<dyn ObjectStore>, place: &BucketPrefix) -> Self {
        let path = match &*place.prefix {
            "" => OWNER.to_owned(),
            prefix => format!("{prefix}/{OWNER}"),
        };
        Self {
            objects,
            path: Path::from(path),
            place: place.to_string(),
            owner: format!("{:032x}", fastrand::u128(..)),
            state: Mutex::default(),
        }
    }

    /// Whether changes may begin now.
    pub(crate) fn check(&self) -> Result<(), StorageError> {
        match self.state.lock().owned_until {
            Some(until) if Instant::now() < until => Ok(()),
            _ => Err(StorageError::LeaseLost(self.place.clone())),
        }
    }

    /// Takes the lease if no one has it. Has to be called again and again until it returns `true`: it remembers since when
    /// another owner has not renewed it.
    pub(crate) async fn try_acquire(&self) -> Result<bool, StorageError> {
        let mode = match self.objects.get(&self.path).await {
            Err(Error::NotFound { .. }) => PutMode::Create,
            Err(error) => return Err(self.error(error)),
            Ok(found) => {
                let version =
                    UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
                let content = found.bytes().await.map_err(|error| self.error(error))?;
                // One that cannot be read may belong to a newer release, which renews it.
                let is_free = serde_json::from_slice::<OwnerRecord>(&content)
                    .is_ok_and(|record| record.released || record.owner == self.owner);
                if !is_free && !self.has_expired(version.e_tag.as_ref()) {
                    return Ok(false);
                }
                PutMode::Update(version)
            }
        };
        let is_new = matches!(mode, PutMode::Create);
        if !self.replace(mode, false).await? {
            self.state.lock().seen = None;
            return Ok(false);
        }
        if is_new {
            self.check_conditions().await?;
        }
        Ok(true)
    }

    /// Whether another owner's version has been seen unchanged for the duration of a lease.
    fn has_expired(&self, e_tag: Option<&String>) -> bool {
        let mut state = self.state.lock();
        match &state.seen {
            Some((seen, since)) if seen.as_ref() == e_tag => since.elapsed() >= LEASE_DURATION,
            _ => {
                state.seen = Some((e_tag.cloned(), Instant::now()));
                false
            }
        }
    }

    /// A server that ignores conditions would let two gateways own the same batches.
    async fn check_conditions(&self) -> Result<(), StorageError> {
        if self.replace(PutMode::Create, false).await? {
            self.state.lock().owned_until = None;
            return Err(StorageError::Unconditional(self.place.clone()));
        }
        Ok(())
    }

    /// Writes the object under a condition. Returns whether the condition held.
    async fn replace(&self, mode: PutMode, released: bool) -> Result<bool, StorageError> {
        let record = {
            let mut state = self.state.lock();
            state.renewals += 1;
            OwnerRecord { owner: self.owner.clone(), renewal: state.renewals, released }
        };
        let content =
            serde_json::to_vec(&record).map_err(|error| StorageError::io(&self.place, error.into()))?;
        let begun = Instant::now();
        let put = self.objects.put_opts(&self.path, PutPayload::from(content), mode.into());
        match timeout(CHANGE_TIMEOUT, put).await {
            Ok(Ok(put)) => {
                let mut state = self.state.lock();
                state.version = Some(put.into());
                state.owned_until = (!released).then(|| begun + OWNED_DURATION);
                state.seen = None;
                Ok(true)
            }
            Ok(Err(Error::AlreadyExists { .. } | Error::Precondition { .. })) => Ok(false),
            Ok(Err(error)) => Err(self.error(error)),
            Err(_) => Err(StorageError::Timeout { key: self.path.to_string(), limit: CHANGE_TIMEOUT }),
        }
    }

    /// Renews the lease until `ended`, or until it is lost.
    pub(crate) async fn renew(&self, ended: &CancellationToken) {
        let mut pause = RENEW_INTERVAL;
        while ended.run_until_cancelled(sleep(pause)).await.is_some() {
            pause = RENEW_INTERVAL;
            match self.renew_once().await {
                Ok(true) => {}
                Ok(false) => {
                    self.state.lock().owned_until = None;
                    tracing::error!(place = %self.place, "another gateway has taken over the files and batches");
                    return;
                }
                Err(error) => {
                    pause = RETRY_INTERVAL;
                    tracing::warn!(%error, "the lease on files and batches cannot be renewed; retrying");
                    if self.check().is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Whether the lease is still this process's. An earlier write may have succeeded although its response was lost.
    async fn renew_once(&self) -> Result<bool, StorageError> {
        let Some(version) = self.state.lock().version.clone() else { return Ok(false) };
        if self.replace(PutMode::Update(version), false).await? {
            return Ok(true);
        }
        let found = self.objects.get(&self.path).await;
        let found = match found {
            Err(Error::NotFound { .. }) => return Ok(false),
            found => found.map_err(|error| self.error(error))?,
        };
        let version = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
        let content = found.bytes().await.map_err(|error| self.error(error))?;
        let is_own =
            serde_json::from_slice::<OwnerRecord>(&content).is_ok_and(|record| record.owner == self.owner);
        if !is_own {
            return Ok(false);
        }
        self.replace(PutMode::Update(version), false).await
    }

    /// Gives the lease up, so that another gateway need not wait until it expires. Nothing may be changed afterwards.
    pub(crate) async fn release(&self) {
        let version = {
            let mut state = self.state.lock();
            if state.owned_until.take().is_none() {
                return;
            }
            state.version.take()
        };
        let Some(version) = version else { return };
        match self.replace(PutMode::Update(version), true).await {
            Ok(true) => {}
            Ok(false) => tracing::debug!("the lease on files and batches was no longer this gateway's"),
            Err(error) => {
                tracing::warn!(%error, "the lease on files and batches is not released; it will expire");
            }
        }
    }

    fn error(&self, error: Error) -> StorageError {
        StorageError::object(&format!("{} ({})", self.place, self.path), error)
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    fn lease(objects: &Arc<InMemory>) -> StoreLease {
        let place = BucketPrefix { bucket: "b".to_owned(), prefix: "p".to_owned() };
        StoreLease::new(objects.clone(), &place)
    }

    #[tokio::test(start_paused = true)]
    async fn one_process_has_the_lease_until_it_is_released() {
        let objects = Arc::new(InMemory::new());
        let (first, second) = (lease(&objects), lease(&objects));
        assert!(first.check().is_err());
        assert!(first.try_acquire().await.unwrap());
        first.check().unwrap();
        let ended = CancellationToken::new();
        let others = async {
            for _ in 0..100 {
                assert!(!second.try_acquire().await.unwrap());
                first.check().unwrap();
                sleep(RETRY_INTERVAL).await;
            }
            ended.cancel();
        };
        tokio::join!(first.renew(&ended), others);
        first.release().await;
        assert!(matches!(first.check(), Err(StorageError::LeaseLost(_))));
        assert!(second.try_acquire().await.unwrap());
        assert!(!first.try_acquire().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_not_renewed_ends_before_another_begins() {
        let objects = Arc::new(InMemory::new());
        let (first, second) = (lease(&objects), lease(&objects));
        assert!(first.try_acquire().await.unwrap());
        let begun = Instant::now();
        let mut lost_at = None;
        while !second.try_acquire().await.unwrap() {
            if first.check().is_err() {
                lost_at.get_or_insert(begun.elapsed());
            }
            sleep(Duration::from_millis(100)).await;
        }
        let lost_at = lost_at.unwrap();
        assert!(begun.elapsed() >= lost_at + CHANGE_TIMEOUT, "{lost_at:?} {:?}", begun.elapsed());
        // The first one's renewal is rejected, and so is its release.
        first.renew(&CancellationToken::new()).await;
        assert!(first.check().is_err());
        first.release().await;
        second.check().unwrap();
        assert!(second.renew_once().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_whose_response_was_lost_is_its_own() {
        let objects = Arc::new(InMemory::new());
        let lease = lease(&objects);
        assert!(lease.try_acquire().await.unwrap());
        let before = lease.state.lock().version.clone();
        assert!(lease.renew_once().await.unwrap());
        lease.state.lock().version = before;
        assert!(lease.renew_once().await.unwrap());
        lease.check().unwrap();
    }
}
