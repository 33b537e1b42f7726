//! Put and upsert operations.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ReplicaDescriptor, ReplicaMedium};
use moongate_master_client::rpc::{PutMode, RpcError};
use moongate_runtime::BackoffPolicy;
use moongate_transfer::TransferError;

use crate::checksum::checksum;
use crate::client::{KvClient, KvClientInner};
use crate::error::{GRANT_PAUSE, KvError, NodeError};
use crate::key_locks::KeyLockGuard;
use crate::locate::ReplicaSource;
use crate::options::PutOptions;
use crate::slice_transfer::SliceTransfer;
use crate::slices::{cut, slice_length};

/// Pauses after the master found no space, which vary by half. Mooncake's master evicts in the background.
const ALLOCATION_BACKOFF: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(10), max: Duration::from_millis(320) };
/// Delay before a put whose future was dropped is revoked: a node may still be writing received bytes, and the space must not
/// be allocated to another object until that has ended.
const REVOKE_GRACE: Duration = Duration::from_secs(1);

/// Result of a successful put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object was stored in all replicas.
    Stored,
    /// An object with this key exists or is being put by another client. It is unchanged.
    AlreadyExists,
}

impl KvClient {
    /// Puts an object. An existing one is unchanged.
    ///
    /// # Errors
    /// When the store has no free space, or the object cannot be written. Nothing is stored in that case.
    pub async fn put(&self, key: &str, bytes: &[u8], options: &PutOptions) -> Result<PutOutcome, KvError> {
        self.put_ranges(key, &[bytes], options).await
    }

    /// As [`KvClient::put`], of an object that is in several ranges of memory, one after another.
    ///
    /// # Errors
    /// As [`KvClient::put`].
    pub async fn put_ranges(
        &self,
        key: &str,
        ranges: &[&[u8]],
        options: &PutOptions,
    ) -> Result<PutOutcome, KvError> {
        self.store(PutMode::Put, key, ranges, options).await
    }

    /// Puts an object, or replaces an existing one. Supported by masters since 0.3.10.post2.
    ///
    /// # Errors
    /// As [`KvClient::put`].
    pub async fn upsert(&self, key: &str, bytes: &[u8], options: &PutOptions) -> Result<(), KvError> {
        self.upsert_ranges(key, &[bytes], options).await
    }

    /// As [`KvClient::upsert`], of an object that is in several ranges of memory, one after another.
    ///
    /// # Errors
    /// As [`KvClient::put`].
    pub async fn upsert_ranges(
        &self,
        key: &str,
        ranges: &[&[u8]],
        options: &PutOptions,
    ) -> Result<(), KvError> {
        self.shared.cache.remove(key);
        self.store(PutMode::Upsert, key, ranges, options).await.map(drop)
    }

    pub(crate) async fn store(
        &self,
        mode: PutMode,
        key: &str,
        ranges: &[&[u8]],
        options: &PutOptions,
    ) -> Result<PutOutcome, KvError> {
        let size: usize = ranges.iter().map(|range| range.len()).sum();
        if size == 0 {
            return Err(KvError::Empty { key: key.to_owned() });
        }
        let lock = match mode {
            PutMode::Upsert => self.shared.key_locks.lock(key).await,
            PutMode::Put => match self.shared.key_locks.try_lock(key) {
                Some(lock) => lock,
                None => return Ok(PutOutcome::AlreadyExists),
            },
        };
        let attempts = self.shared.options.attempts.max(1);
        let mut attempt = 1;
        loop {
            let replicas = match self.start(mode, key, size as u64, options).await {
                Err(error) if error.code() == Some(ErrorCode::OBJECT_ALREADY_EXISTS) => {
                    return Ok(PutOutcome::AlreadyExists);
                }
                // If the response was lost, the put may have started. It is not revoked here, because another caller of this
                // client may be putting the same key; the master expires it.
                replicas => replicas?,
            };
            let open = InFlightPuts::new(self, mode, vec![key], vec![lock.clone()]);
            let error = match self.write(key, &replicas, ranges, true).await {
                Ok(()) => {
                    open.commit();
                    self.end(mode, key, self.checksum(ranges)).await?;
                    return Ok(PutOutcome::Stored);
                }
                Err(error) => error,
            };
            if may_still_be_writing(&error) {
                open.commit();
                return Err(error);
            }
            open.revoke().await;
            if attempt == attempts {
                return Err(error);
            }
            if error.is_not_granted() {
                tokio::time::sleep(GRANT_PAUSE).await;
            }
            tracing::debug!(key, attempt, %error, "retrying a put");
            attempt += 1;
        }
    }

    /// Allocates space for the replicas, with retries while the master has none.
    async fn start(
        &self,
        mode: PutMode,
        key: &str,
        size: u64,
        options: &PutOptions,
    ) -> Result<Vec<ReplicaDescriptor<String>>, KvError> {
        let attempts = self.shared.options.allocation_attempts.max(1);
        for failures in 1..=attempts {
            let config = options.config(&[0], self.shared.options.locality.host_id());
            match self.shared.objects.start(mode, key, size, config).await {
                Err(RpcError::Refused(ErrorCode::NO_AVAILABLE_HANDLE)) => {}
                started => return started.map_err(|source| KvError::master("put", key, source)),
            }
            if failures < attempts {
                let pause = ALLOCATION_BACKOFF.pause(failures);
                tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            }
        }
        Err(KvError::NoRoom { key: key.to_owned(), size })
    }

    /// Writes all replicas concurrently. Returns only after every write has ended. `may_busy_poll` if the caller waits for nothing else.
    pub(crate) async fn write(
        &self,
        key: &str,
        replicas: &[ReplicaDescriptor<String>],
        ranges: &[&[u8]],
        may_busy_poll: bool,
    ) -> Result<(), KvError> {
        let size = ranges.iter().map(|range| range.len()).sum();
        let slice = slice_length(size, self.shared.options.slice_bytes);
        let mut targets = Vec::with_capacity(replicas.len());
        for replica in replicas {
            targets.push(self.target(key, replica, size)?);
        }
        let written = match &targets[..] {
            [] => return Err(no_replica(key, "none at all")),
            [target] if size <= slice => self.write_slice(target, 0, ranges, may_busy_poll).await,
            targets => {
                let slices = cut(ranges.iter().copied(), slice);
                let writes = targets.iter().flat_map(|target| {
                    let slices = slices.iter().enumerate();
                    slices.map(move |(index, part)| self.write_slice(target, index * slice, part, false))
                });
                join_all(writes).await.into_iter().collect()
            }
        };
        written.map_err(|source| KvError::Transfer { what: "write", key: key.to_owned(), source })
    }

    async fn write_slice(
        &self,
        target: &ReplicaSource,
        offset: usize,
        from: &[&[u8]],
        may_busy_poll: bool,
    ) -> Result<(), NodeError> {
        let address = target.address.saturating_add(offset as u64);
        self.shared.peers.transfer(&target.peer, address, SliceTransfer::Write { from, may_busy_poll }).await
    }

    fn target(
        &self,
        key: &str,
        replica: &ReplicaDescriptor<String>,
        size: usize,
    ) -> Result<ReplicaSource, KvError> {
        match &replica.medium {
            ReplicaMedium::Memory(buffer) if buffer.size == size as u64 => {
                Ok(ReplicaSource { peer: self.shared.peers.get(&buffer.endpoint), address: buffer.address })
            }
            ReplicaMedium::Memory(_) => Err(no_replica(key, "one of another size")),
            _ => Err(no_replica(key, "one that is not in memory")),
        }
    }

    /// The checksum to send to the master. `None` if checksums are off.
    pub(crate) fn checksum(&self, ranges: &[&[u8]]) -> Option<u64> {
        self.shared.options.checksums.then(|| checksum(ranges))
    }

    /// Makes the object visible. The call is idempotent, so it is repeated if the response was lost.
    async fn end(&self, mode: PutMode, key: &str, checksum: Option<u64>) -> Result<(), KvError> {
        let mut ended = self.shared.objects.end(mode, key, checksum).await;
        if ended.as_ref().is_err_and(RpcError::is_response_lost) {
            ended = self.shared.objects.end(mode, key, checksum).await;
        }
        ended.map_err(|source| KvError::master("end the put of", key, source))
    }
}

fn no_replica(key: &str, media: &str) -> KvError {
    KvError::NoReplica { key: key.to_owned(), media: media.to_owned() }
}

/// Whether the node may still be writing, so that the put must not be revoked: its space could be allocated to another object.
/// The master expires it.
pub(crate) fn may_still_be_writing(error: &KvError) -> bool {
    matches!(
        error,
        KvError::Transfer { source: NodeError::Transfer { source: TransferError::TimedOut { .. }, .. }, .. }
    )
}

/// Puts that were started and not ended. They are revoked, also when the caller drops the put's future.
pub(crate) struct InFlightPuts<'a> {
    shared: &'a Arc<KvClientInner>,
    mode: PutMode,
    keys: Vec<&'a str>,
    locks: Vec<KeyLockGuard>,
}

impl<'a> InFlightPuts<'a> {
    /// Holds the locks until the puts are ended or revoked, so that no other put of this client writes the keys.
    pub(crate) fn new(
        client: &'a KvClient,
        mode: PutMode,
        keys: Vec<&'a str>,
        locks: Vec<KeyLockGuard>,
    ) -> Self {
        Self { shared: &client.shared, mode, keys, locks }
    }

    /// Keeps only the puts for which `open` is true for revocation.
    pub(crate) fn retain_keys(&mut self, open: impl Fn(&str) -> bool) {
        self.keys.retain(|key| open(key));
    }

    /// Drops the guard without a revocation.
    fn commit(mut self) {
        self.keys.clear();
    }

    /// Revokes the open puts. All writes must have ended.
    pub(crate) async fn revoke(mut self) {
        let keys: Vec<String> = self.keys.drain(..).map(str::to_owned).collect();
        revoke(self.shared, self.mode, &keys).await;
    }
}

async fn revoke(shared: &KvClientInner, mode: PutMode, keys: &[String]) {
    let revoked = match keys {
        [] => return,
        [key] => shared.objects.revoke(mode, key).await,
        keys => shared.objects.revoke_batch(mode, keys.iter().map(String::as_str).collect()).await.map(drop),
    };
    if let Err(error) = revoked {
        tracing::warn!(puts = keys.len(), %error, "cannot revoke failed puts; the master expires them");
    }
}

impl Drop for InFlightPuts<'_> {
    fn drop(&mut self) {
        if self.keys.is_empty() || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let keys: Vec<String> = self.keys.drain(..).map(str::to_owned).collect();
        let (shared, mode, locks) = (Arc::clone(self.shared), self.mode, std::mem::take(&mut self.locks));
        self.shared.supervisor.spawn("kvclient-revoke", async move {
            tokio::time::sleep(REVOKE_GRACE).await;
            revoke(&shared, mode, &keys).await;
            drop(locks);
        });
    }
}
