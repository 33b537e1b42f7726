//! Getting objects.

use std::time::Instant;

use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::checksum::RunningChecksum;
use crate::client::KvClient;
use crate::error::{GRANT_PAUSE, KvError, NodeError};
use crate::locate::{ObjectLocation, ReadLease, ReplicaSource};
use crate::peer::SliceTransfer;
use crate::slices::slice_length;

/// Where the bytes of an object go.
pub(crate) trait ReadDestination {
    /// Room for an object of this size.
    fn reserve(&mut self, key: &str, size: usize) -> Result<&mut [u8], KvError>;
}

impl ReadDestination for Vec<u8> {
    fn reserve(&mut self, _: &str, size: usize) -> Result<&mut [u8], KvError> {
        if self.len() != size {
            // Fresh memory is zero already, which is cheaper than making it so.
            *self = vec![0; size];
        }
        Ok(self)
    }
}

impl ReadDestination for &mut [u8] {
    fn reserve(&mut self, key: &str, size: usize) -> Result<&mut [u8], KvError> {
        let room = self.len();
        self.get_mut(..size).ok_or_else(|| KvError::TooSmall {
            key: key.to_owned(),
            size: size as u64,
            capacity: room,
        })
    }
}

impl KvClient {
    /// The bytes of an object.
    ///
    /// # Errors
    /// When there is none, or its bytes cannot be had in time from any node that has them.
    pub async fn get(&self, key: &str) -> Result<Bytes, KvError> {
        self.get_located(key, None).await
    }

    /// Gets an object into the caller's buffer, and returns its size. The rest of the buffer stays as it is.
    ///
    /// # Errors
    /// As [`KvClient::get`], or when the buffer is too small. Then the content of the buffer is undefined.
    pub async fn get_into(&self, key: &str, into: &mut [u8]) -> Result<usize, KvError> {
        self.get_into_located(key, into, None).await
    }

    /// [`KvClient::get`] of an object of which it may be known where it is.
    pub(crate) async fn get_located(
        &self,
        key: &str,
        located: Option<ObjectLocation>,
    ) -> Result<Bytes, KvError> {
        if let Some(kept) = self.shared.cache.get(key) {
            return Ok(kept);
        }
        let mut buffer = Vec::new();
        let (_, leased_until) = self.read(key, located, &mut buffer).await?;
        let bytes = Bytes::from(buffer);
        self.shared.cache.insert(key, &bytes, leased_until);
        Ok(bytes)
    }

    /// [`KvClient::get_into`] of an object of which it may be known where it is.
    pub(crate) async fn get_into_located(
        &self,
        key: &str,
        mut into: &mut [u8],
        located: Option<ObjectLocation>,
    ) -> Result<usize, KvError> {
        if let Some(kept) = self.shared.cache.get(key) {
            into.reserve(key, kept.len())?.copy_from_slice(&kept);
            return Ok(kept.len());
        }
        let (size, leased_until) = self.read(key, located, &mut into).await?;
        if self.shared.cache.is_on()
            && let Some(bytes) = into.get(..size)
        {
            self.shared.cache.insert(key, &Bytes::copy_from_slice(bytes), leased_until);
        }
        Ok(size)
    }

    /// Reads an object, again from the start when no replica could be read or the lease ended too early. Returns
    /// its size and until when it is leased.
    async fn read(
        &self,
        key: &str,
        located: Option<ObjectLocation>,
        room: &mut impl ReadDestination,
    ) -> Result<(usize, Instant), KvError> {
        let attempts = self.shared.options.attempts.max(1);
        // One of a batch has others beside it.
        let is_all = located.is_none();
        let mut known = located;
        let (mut attempt, mut damaged) = (1, 0);
        loop {
            let mut located = match known.take().filter(|located| located.lease.is_valid()) {
                Some(located) => located,
                None => self.locate(key).await?,
            };
            // Until the bytes are read, or this attempt is over.
            let staged = self.stage(key, &mut located).await;
            let replicas = located.sources.len();
            if damaged > 0 {
                // Slices may have come from several replicas. Now they are read one by one.
                let next = located.sources.get(damaged - 1).cloned();
                let next = next.ok_or_else(|| KvError::Damaged { key: key.to_owned(), replicas })?;
                located.sources = vec![next];
            }
            let into = room.reserve(key, located.size)?;
            let lease = &located.lease;
            let read = match &staged {
                Ok(_) => tokio::select! {
                    biased;
                    read = self.fill(&located, is_all, into) => read,
                    never = self.renew_lease_until_read(key, lease) => match never {},
                },
                Err(error) => Err(error.clone()),
            };
            let is_there = staged.is_ok_and(|staged| staged.is_none_or(|staged| staged.is_valid()));
            let error = match read {
                Ok(_) if !lease.is_valid() || !is_there => {
                    KvError::LeaseEnded { key: key.to_owned(), lease: lease.length, attempts: attempt }
                }
                Ok(sum) if sum.value().is_none_or(|sum| located.checksum == Some(sum)) => {
                    return Ok((located.size, lease.end()));
                }
                Ok(_) => {
                    tracing::warn!(key, replicas, "the bytes of an object are not those that were written");
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
            tracing::debug!(key, attempt, %error, "reading again");
            attempt += 1;
        }
    }

    /// Renews a lease whenever half of it has passed, for reads that take long.
    async fn renew_lease_until_read(&self, key: &str, lease: &ReadLease) -> std::convert::Infallible {
        loop {
            tokio::time::sleep_until((lease.end() - lease.length / 2).into()).await;
            let asked = Instant::now();
            if matches!(self.shared.objects.exist(vec![key]).await.as_deref(), Ok([Ok(true)])) {
                lease.renew(asked, Instant::now());
            }
            if !lease.is_valid() || lease.end() - lease.length / 2 <= Instant::now() {
                // Too late, or the master does not answer: the end of the read will show it.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Reads all of an object, its slices at once. Returns its checksum if the writer has told it.
    async fn fill(
        &self,
        located: &ObjectLocation,
        is_all: bool,
        into: &mut [u8],
    ) -> Result<RunningChecksum, NodeError> {
        let slice = slice_length(into.len(), self.shared.options.slice_bytes);
        let is_checked = located.checksum.is_some() && self.shared.options.checksums;
        if into.len() <= slice {
            return self
                .read_slice(&located.sources, 0, into, RunningChecksum::new(is_checked), is_all)
                .await;
        }
        let slices = into.chunks_mut(slice).enumerate();
        let read = |(at, part)| {
            self.read_slice(&located.sources, at * slice, part, RunningChecksum::new(is_checked), false)
        };
        let sums = try_join_all(slices.map(read)).await?;
        Ok(sums.iter().fold(RunningChecksum::new(is_checked), RunningChecksum::then))
    }

    /// Reads a slice from the replica that costs least, and from the next one when that fails.
    async fn read_slice(
        &self,
        sources: &[ReplicaSource],
        offset: usize,
        into: &mut [u8],
        mut sum: RunningChecksum,
        is_all: bool,
    ) -> Result<RunningChecksum, NodeError> {
        let mut left: Vec<&ReplicaSource> = sources.iter().collect();
        // Of those that cost the same, every client would read the first.
        fastrand::shuffle(&mut left);
        loop {
            let best = left.iter().enumerate().min_by_key(|(_, source)| source.peer.cost()).map(|(at, _)| at);
            // There is a source, or the object would not have been located.
            let Some(source) = best.map(|at| left.swap_remove(at)) else { return Ok(sum) };
            let address = source.address.saturating_add(offset as u64);
            let what = SliceTransfer::Read { into: &mut *into, sum: &mut sum, may_busy_poll: is_all };
            match self.shared.peers.transfer(&source.peer, address, what).await {
                Ok(()) => return Ok(sum),
                Err(error) if left.is_empty() => return Err(error),
                Err(error) => tracing::debug!(%error, "reading another replica"),
            }
        }
    }
}
