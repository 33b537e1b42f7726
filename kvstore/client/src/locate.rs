//! Where an object is, and for how long that is certain.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_wire::types::{self, ReplicaList, ReplicaMedium, ReplicaStatus};
use parking_lot::Mutex;

use crate::client::KvClient;
use crate::error::KvError;
use crate::peer::PeerNode;

/// What the master knows of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectStat {
    /// Bytes.
    pub size: u64,
    /// Its copies.
    pub replicas: Vec<ObjectReplica>,
    /// For how long it is leased now, because it was asked for.
    pub lease: Duration,
    /// The writer's checksum, if it gave one.
    pub checksum: Option<u64>,
}

/// A copy of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectReplica {
    /// Unique within a master.
    pub id: u64,
    /// `memory`, `nof`, `disk`, `local disk` or `dfs`.
    pub medium: &'static str,
    /// The node that has it, as `host:port`, or the path of its file.
    pub location: String,
    /// Where in that node's memory, or in that file.
    pub address: u64,
    /// Whether it can be read.
    pub complete: bool,
}

impl ObjectReplica {
    fn new(replica: &types::ReplicaDescriptor<String>) -> (Self, u64) {
        let (medium, place, address, size) = match &replica.medium {
            ReplicaMedium::Memory(buffer) => ("memory", &buffer.endpoint, buffer.address, buffer.size),
            ReplicaMedium::Nof(buffer) => ("nof", &buffer.endpoint, buffer.address, buffer.size),
            ReplicaMedium::Disk(disk) => ("disk", &disk.file_path, 0, disk.object_size),
            ReplicaMedium::LocalDisk(disk) => ("local disk", &disk.transport_endpoint, 0, disk.object_size),
            ReplicaMedium::Dfs(file) => ("dfs", &file.file_path, file.offset, file.object_size),
        };
        let (place, complete) = (place.clone(), replica.status == ReplicaStatus::COMPLETE);
        (Self { id: replica.id, medium, location: place, address, complete }, size)
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

/// Where an object can be read.
#[derive(Debug)]
pub(crate) struct ObjectLocation {
    pub(crate) size: usize,
    /// Replicas in memory.
    pub(crate) sources: Vec<ReplicaSource>,
    /// Where the node is asked that has it on its disk. Of use if there is no other replica.
    pub(crate) disk: Option<Arc<str>>,
    pub(crate) lease: ReadLease,
    /// The writer's, if it gave one.
    pub(crate) checksum: Option<u64>,
}

/// A replica in memory.
#[derive(Clone, Debug)]
pub(crate) struct ReplicaSource {
    pub(crate) peer: Arc<PeerNode>,
    pub(crate) address: u64,
}

/// For how long an object neither goes away nor changes. It counts from before the master was asked.
#[derive(Debug)]
pub(crate) struct ReadLease {
    pub(crate) length: Duration,
    end: Mutex<Instant>,
}

impl ReadLease {
    pub(crate) fn new(asked: Instant, length: Duration) -> Self {
        Self { length, end: Mutex::new(asked + length) }
    }

    pub(crate) fn end(&self) -> Instant {
        *self.end.lock()
    }

    pub(crate) fn is_valid(&self) -> bool {
        Instant::now() < self.end()
    }

    /// The master has leased the object again when it was asked then. Of no use if that was too late.
    pub(crate) fn renew(&self, asked: Instant, answered: Instant) {
        let mut end = self.end.lock();
        if answered < *end {
            *end = asked + self.length;
        }
    }
}

impl KvClient {
    /// Asks the master where an object is.
    pub(crate) async fn locate(&self, key: &str) -> Result<ObjectLocation, KvError> {
        let asked = Instant::now();
        let list = self.shared.objects.replicas(key).await;
        let list = list.map_err(|source| KvError::master("find", key, source))?;
        self.located(key, asked, &list)
    }

    /// Understands the master's answer to a question that was asked then.
    pub(crate) fn located(
        &self,
        key: &str,
        asked: Instant,
        list: &ReplicaList<String>,
    ) -> Result<ObjectLocation, KvError> {
        let mut size = None;
        let mut sources = Vec::with_capacity(list.replicas.len());
        for replica in &list.replicas {
            let ReplicaMedium::Memory(buffer) = &replica.medium else { continue };
            // Copies of another size cannot be of the same object.
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
            let found: Vec<_> =
                list.replicas.iter().map(|replica| ObjectReplica::new(replica).0.medium).collect();
            let found = if found.is_empty() { "none at all".to_owned() } else { found.join(", ") };
            return Err(KvError::NoReplica { key: key.to_owned(), found });
        };
        let limit = self.shared.options.largest_object;
        let too_large = KvError::TooLarge { key: key.to_owned(), size, limit };
        let size = usize::try_from(size).ok().filter(|_| size <= limit).ok_or(too_large)?;
        let lease = ReadLease::new(asked, Duration::from_millis(list.lease_ttl_ms));
        Ok(ObjectLocation { size, sources, disk, lease, checksum: list.object_checksum })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_renewed_only_while_it_lasts() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let lease = ReadLease::new(start, 10 * second);
        assert!(lease.is_valid());
        lease.renew(start + 5 * second, start + 6 * second);
        assert_eq!(lease.end(), start + 15 * second);
        lease.renew(start + 14 * second, start + 16 * second);
        assert_eq!(lease.end(), start + 15 * second, "nobody knows what happened in between");
    }
}
