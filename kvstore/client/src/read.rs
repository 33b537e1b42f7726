//! Get operations.

use std::time::Instant;

use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::checksum::RunningChecksum;
use crate::client::KvClient;
use crate::error::{GRANT_PAUSE, KvError, NodeError};
use crate::locate::{ObjectLocation, ReadLease, ReplicaSource};
use crate::slice_transfer::SliceTransfer;
use crate::slices::{cut, max_read_slice, slice_length};

/// Destination of a read: a growing vector, or ranges of memory.
pub(crate) trait ReadDestination {
    /// Returns ranges of exactly this size together.
    fn reserve(&mut self, key: &str, size: usize) -> Result<Vec<&mut [u8]>, KvError>;
}

impl ReadDestination for Vec<u8> {
    fn reserve(&mut self, _: &str, size: usize) -> Result<Vec<&mut [u8]>, KvError> {
        if self.len() != size {
            // A new allocation comes zeroed from the system, which is cheaper than resizing.
            *self = vec![0; size];
        }
        Ok(vec![self])
    }
}

impl ReadDestination for [&mut [u8]] {
    fn reserve(&mut self, key: &str, size: usize) -> Result<Vec<&mut [u8]>, KvError> {
        let capacity: usize = self.iter().map(|range| range.len()).sum();
        if capacity < size {
            return Err(KvError::TooSmall { key: key.to_owned(), size: size as u64, capacity });
        }
        let mut missing = size;
        let filled = self.iter_mut().filter_map(|range| {
            let length = range.len().min(missing);
            missing -= length;
            range.get_mut(..length).filter(|range| !range.is_empty())
        });
        Ok(filled.collect())
    }
}

impl KvClient {
    /// Gets an object.
    ///
    /// # Errors
    /// When it does not exist, or cannot be read in time from any replica.
    pub async fn get(&self, key: &str) -> Result<Bytes, KvError> {
        self.get_located(key, None).await
    }

    /// Gets an object into the caller's buffer, and returns its size. The rest of the buffer is unchanged.
    ///
    /// # Errors
    /// As [`KvClient::get`], or when the buffer is too small. The content of the buffer is undefined after an error.
    pub async fn get_into(&self, key: &str, into: &mut [u8]) -> Result<usize, KvError> {
        self.get_into_located(key, &mut [into], None).await
    }

    /// As [`KvClient::get_into`], into several ranges of memory, which are filled in their order.
    ///
    /// # Errors
    /// As [`KvClient::get_into`].
    pub async fn get_into_ranges(&self, key: &str, into: &mut [&mut [u8]]) -> Result<usize, KvError> {
        self.get_into_located(key, into, None).await
    }

    /// [`KvClient::get`] with an optional location from a batch lookup.
    pub(crate) async fn get_located(
        &self,
        key: &str,
        located: Option<ObjectLocation>,
    ) -> Result<Bytes, KvError> {
        if let Some(cached) = self.shared.cache.get(key) {
            return Ok(cached);
        }
        let mut buffer = Vec::new();
        let (_, leased_until) = self.read(key, located, &mut buffer).await?;
        let bytes = Bytes::from(buffer);
        self.shared.cache.insert(key, &bytes, leased_until);
        Ok(bytes)
    }

    /// [`KvClient::get_into`] with an optional location from a batch lookup.
    pub(crate) async fn get_into_located(
        &self,
        key: &str,
        into: &mut [&mut [u8]],
        located: Option<ObjectLocation>,
    ) -> Result<usize, KvError> {
        if let Some(cached) = self.shared.cache.get(key) {
            let mut left = &cached[..];
            for range in into.reserve(key, cached.len())? {
                let (part, rest) = left.split_at(range.len());
                range.copy_from_slice(part);
                left = rest;
            }
            return Ok(cached.len());
        }
        let (size, leased_until) = self.read(key, located, into).await?;
        if self.shared.cache.is_on() {
            let bytes = into.reserve(key, size)?.concat();
            self.shared.cache.insert(key, &Bytes::from(bytes), leased_until);
        }
        Ok(size)
    }

    /// Reads an object, with retries from the start when all replicas failed or the lease expired during the read. Returns
    /// its size and the end of its lease.
    async fn read(
        &self,
        key: &str,
        located: Option<ObjectLocation>,
        destination: &mut (impl ReadDestination + ?Sized),
    ) -> Result<(usize, Instant), KvError> {
        let attempts = self.shared.options.attempts.max(1);
        // A caller that reads a batch waits for other transfers too.
        let may_busy_poll = located.is_none();
        let mut batch_location = located;
        let (mut attempt, mut damaged) = (1, 0);
        loop {
            let mut located = match batch_location.take().filter(|located| located.lease.is_valid()) {
                Some(located) => located,
                None => self.locate(key).await?,
            };
            // The guard keeps the staged object until the end of this attempt.
            let staged = self.stage(key, &mut located).await;
            let replicas = located.sources.len();
            if damaged > 0 {
                // The slices may have come from several replicas. After a mismatch, each replica is read as a whole, one by one.
                let next = located.sources.get(damaged - 1).cloned();
                let next = next.ok_or_else(|| KvError::Damaged { key: key.to_owned(), replicas })?;
                located.sources = vec![next];
            }
            let into = destination.reserve(key, located.size)?;
            let lease = &located.lease;
            let read = match &staged {
                Ok(_) => tokio::select! {
                    biased;
                    read = self.fill(&located, may_busy_poll, into) => read,
                    never = self.renew_lease_until_read(key, lease) => match never {},
                },
                Err(error) => Err(error.clone()),
            };
            let is_staged = staged.is_ok_and(|staged| staged.is_none_or(|staged| staged.is_valid()));
            let error = match read {
                Ok(_) if !lease.is_valid() || !is_staged => {
                    KvError::LeaseEnded { key: key.to_owned(), lease: lease.length, attempts: attempt }
                }
                Ok(sum) if sum.value().is_none_or(|sum| located.checksum == Some(sum)) => {
                    return Ok((located.size, lease.end()));
                }
                Ok(_) => {
                    tracing::warn!(
                        key,
                        replicas,
                        "an object failed its checksum; reading its replicas one by one"
                    );
                    damaged += 1;
                    continue;
                }
                Err(source) => KvError::Transfer { what: "read", key: key.to_owned(), source },
            };
            if attempt == attempts {
                return Err(error);
            }
            if error.is_not_granted() {
                tokio::time::sleep(GRANT_PAUSE).await;
            }
            tracing::debug!(key, attempt, %error, "retrying a get");
            attempt += 1;
        }
    }

    /// Renews the lease of a long read each time half of it has passed.
    async fn renew_lease_until_read(&self, key: &str, lease: &ReadLease) -> std::convert::Infallible {
        loop {
            tokio::time::sleep_until((lease.end() - lease.length / 2).into()).await;
            let requested_at = Instant::now();
            if matches!(self.shared.objects.exist(vec![key]).await.as_deref(), Ok([Ok(true)])) {
                lease.renew(requested_at, Instant::now());
            }
            if !lease.is_valid() || lease.end() - lease.length / 2 <= Instant::now() {
                // The renewal came too late, or the master does not answer. The check after the read decides.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Reads a whole object, with its slices in parallel. The checksum is computed only if the writer sent one.
    async fn fill(
        &self,
        located: &ObjectLocation,
        may_busy_poll: bool,
        mut into: Vec<&mut [u8]>,
    ) -> Result<RunningChecksum, NodeError> {
        let is_local = located.sources.iter().all(|source| source.peer.is_local());
        let slice = slice_length(located.size, max_read_slice(self.shared.options.slice_bytes, is_local));
        let is_checked = located.checksum.is_some() && self.shared.options.checksums;
        if located.size <= slice {
            return self
                .read_slice(&located.sources, 0, &mut into, RunningChecksum::new(is_checked), may_busy_poll)
                .await;
        }
        let mut slices = cut(into, slice);
        let read = |(index, part)| {
            self.read_slice(&located.sources, index * slice, part, RunningChecksum::new(is_checked), false)
        };
        let sums = try_join_all(slices.iter_mut().map(Vec::as_mut_slice).enumerate().map(read)).await?;
        Ok(sums.iter().fold(RunningChecksum::new(is_checked), RunningChecksum::then))
    }

    /// Reads a slice from the replica with the lowest cost, and falls back to the next one on failure.
    async fn read_slice(
        &self,
        sources: &[ReplicaSource],
        offset: usize,
        into: &mut [&mut [u8]],
        mut sum: RunningChecksum,
        may_busy_poll: bool,
    ) -> Result<RunningChecksum, NodeError> {
        let mut remaining: Vec<&ReplicaSource> = sources.iter().collect();
        // Without the shuffle, all clients would read the first of several replicas with equal cost.
        fastrand::shuffle(&mut remaining);
        loop {
            let cheapest = remaining.iter().enumerate().min_by_key(|(_, source)| source.peer.cost());
            // An object without a source is not located, so the list is not empty.
            let Some(source) = cheapest.map(|(index, _)| index).map(|index| remaining.swap_remove(index))
            else {
                return Ok(sum);
            };
            let address = source.address.saturating_add(offset as u64);
            let what = SliceTransfer::Read { into: &mut *into, sum: &mut sum, may_busy_poll };
            match self.shared.peers.transfer(&source.peer, address, what).await {
                Ok(()) => return Ok(sum),
                Err(error) if remaining.is_empty() => return Err(error),
                Err(error) => tracing::debug!(%error, "reading another replica"),
            }
        }
    }
}
