//! Locations of objects, and the leases during which they are valid.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_wire::types::{self, ReplicaList, ReplicaMedium, ReplicaStatus};
use parking_lot::Mutex;

use crate::client::KvClient;
use crate::error::KvError;
use crate::peer::PeerNode;

/// The master's record of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectStat {
    /// Size of the object in bytes.
    pub size: u64,
    pub replicas: Vec<ObjectReplica>,
    /// Duration of the lease that this query acquired.
    pub lease: Duration,
    /// The writer's CRC-64 checksum, if it sent one.
    pub checksum: Option<u64>,
}

/// One replica of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectReplica {
    /// Replica id, unique within a master.
    pub id: u64,
    /// `memory`, `nof`, `disk`, `local disk` or `dfs`.
    pub medium: &'static str,
    /// The node with the replica, as `host:port`, or the path of its file.
    pub location: String,
    /// Address in the node's memory, or offset in the file.
    pub address: u64,
    /// Whether it was written completely, and so is readable.
    pub complete: bool,
}

impl ObjectReplica {
    fn new(replica: &types::ReplicaDescriptor<String>) -> (Self, u64) {
        let (medium, location, address, size) = match &replica.medium {
            ReplicaMedium::Memory(buffer) => ("memory", &buffer.endpoint, buffer.address, buffer.size),
            ReplicaMedium::Nof(buffer) => ("nof", &buffer.endpoint, buffer.address, buffer.size),
            ReplicaMedium::Disk(disk) => ("disk", &disk.file_path, 0, disk.object_size),
            ReplicaMedium::LocalDisk(disk) => ("local disk", &disk.transport_endpoint, 0, disk.object_size),
            ReplicaMedium::Dfs(file) => ("dfs", &file.file_path, file.offset, file.object_size),
        };
        let (location, complete) = (location.clone(), replica.status == ReplicaStatus::COMPLETE);
        (Self { id: replica.id, medium, location, address, complete }, size)
    }
}

impl From<&ReplicaList<String>> for ObjectStat {
    fn from(list: &ReplicaList<String>) -> Self {
        let (replicas, sizes): (Vec<_>, Vec<_>) = list.replicas.iter().map(ObjectReplica::new).unzip();
        Self {
            size: sizes.first().copied().unwrap_or_default(),
            replicas,
            lease: Duration::from_millis(list.lease_ttl_ms),
            checksum: list.object_checksum,
        }
    }
}

/// Sources from which an object can be read.
#[derive(Debug)]
pub(crate) struct ObjectLocation {
    pub(crate) size: usize,
    /// Complete replicas in memory.
    pub(crate) sources: Vec<ReplicaSource>,
    /// Address of the node with a replica on disk. Used only if no replica is in memory.
    pub(crate) disk: Option<Arc<str>>,
    pub(crate) lease: ReadLease,
    /// The writer's checksum, if it sent one.
    pub(crate) checksum: Option<u64>,
}

/// A replica in a node's memory.
#[derive(Clone, Debug)]
pub(crate) struct ReplicaSource {
    pub(crate) peer: Arc<PeerNode>,
    pub(crate) address: u64,
}

/// The time during which an object is neither removed nor changed, counted from before the request to the master.
#[derive(Debug)]
pub(crate) struct ReadLease {
    pub(crate) length: Duration,
    end: Mutex<Instant>,
}

impl ReadLease {
    pub(crate) fn new(requested_at: Instant, length: Duration) -> Self {
        Self { length, end: Mutex::new(requested_at + length) }
    }

    pub(crate) fn end(&self) -> Instant {
        *self.end.lock()
    }

    pub(crate) fn is_valid(&self) -> bool {
        Instant::now() < self.end()
    }

    /// Extends the lease after a renewal that was sent at `requested_at`. Ignored if the lease expired before the response.
    pub(crate) fn renew(&self, requested_at: Instant, responded_at: Instant) {
        let mut end = self.end.lock();
        if responded_at < *end {
            *end = requested_at + self.length;
        }
    }
}

impl KvClient {
    /// Queries the master for an object's replicas, which acquires a lease.
    pub(crate) async fn locate(&self, key: &str) -> Result<ObjectLocation, KvError> {
        let requested_at = Instant::now();
        let list = self.shared.objects.replicas(key).await;
        let list = list.map_err(|source| KvError::master("find", key, source))?;
        self.located(key, requested_at, &list)
    }

    /// Converts the master's response to a request that was sent at `requested_at`.
    pub(crate) fn located(
        &self,
        key: &str,
        requested_at: Instant,
        list: &ReplicaList<String>,
    ) -> Result<ObjectLocation, KvError> {
        let mut size = None;
        let mut sources = Vec::with_capacity(list.replicas.len());
        for replica in &list.replicas {
            let ReplicaMedium::Memory(buffer) = &replica.medium else { continue };
            // A replica with another size cannot belong to the same object.
            if replica.status == ReplicaStatus::COMPLETE && *size.get_or_insert(buffer.size) == buffer.size {
                sources.push(ReplicaSource {
                    peer: self.shared.peers.get(&buffer.endpoint),
                    address: buffer.address,
                });
            }
        }
        let on_disk = list.replicas.iter().find_map(|replica| match &replica.medium {
            ReplicaMedium::LocalDisk(disk) if replica.status == ReplicaStatus::COMPLETE => Some(disk),
            _ => None,
        });
        let disk = on_disk.map(|disk| disk.transport_endpoint.as_str().into());
        let Some(size) = size.or_else(|| on_disk.map(|disk| disk.object_size)) else {
            let media: Vec<_> =
                list.replicas.iter().map(|replica| ObjectReplica::new(replica).0.medium).collect();
            let media = if media.is_empty() { "none at all".to_owned() } else { media.join(", ") };
            return Err(KvError::NoReplica { key: key.to_owned(), media });
        };
        let limit = self.shared.options.largest_object;
        let too_large = KvError::TooLarge { key: key.to_owned(), size, limit };
        let size = usize::try_from(size).ok().filter(|_| size <= limit).ok_or(too_large)?;
        let lease = ReadLease::new(requested_at, Duration::from_millis(list.lease_ttl_ms));
        Ok(ObjectLocation { size, sources, disk, lease, checksum: list.object_checksum })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_is_renewed_only_before_it_expires() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let lease = ReadLease::new(start, 10 * second);
        assert!(lease.is_valid());
        lease.renew(start + 5 * second, start + 6 * second);
        assert_eq!(lease.end(), start + 15 * second);
        lease.renew(start + 14 * second, start + 16 * second);
        assert_eq!(lease.end(), start + 15 * second, "the object may have changed after the expiry");
    }
}
