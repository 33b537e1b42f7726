//! Replicas: where the bytes of an object are.

use super::{SegmentLocality, Uuid};
use crate::dialect::Dialect;
use crate::pack::{
    Pack, PackError, PackReader, PackWriter, Unpack, UnpackError, WireString, layout, type_marker, wire_code,
};

wire_code! {
    /// The type of replicas that an operation affects.
    pub struct ReplicaType(i32) {
        MEMORY = 0,
        /// Replicas in a shared file system.
        DISK = 1,
        /// Replicas on a node's local disk.
        LOCAL_DISK = 2,
        NOF_SSD = 3,
        /// All replicas that a client writes in one put.
        ALL = 4,
        /// Replicas in a distributed file system.
        DFS = 100,
    }
}

wire_code! {
    pub struct ReplicaStatus(i32) {
        UNDEFINED = 0,
        INITIALIZED = 1,
        PROCESSING = 2,
        COMPLETE = 3,
        REMOVED = 4,
        FAILED = 5,
    }
}

/// A range of a node's memory, or of an NVMe-oF disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BufferDescriptor<S> {
    /// Size of the range in bytes.
    pub size: u64,
    /// Address of the first byte in the node.
    pub address: u64,
    /// Transfer protocol, for example `tcp` or `rdma`.
    pub protocol: S,
    /// Transfer endpoint: the node's `host:port`.
    pub endpoint: S,
    /// Location of the memory in its node, if it is known. Since 0.3.14.
    pub locality: Option<SegmentLocality<S>>,
}

layout! { BufferDescriptor<S> { size, address, protocol, endpoint } compatible since V0_3_14 { locality } }

/// A file of a shared file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskReplica<S> {
    pub file_path: S,
    /// Size of the object in bytes.
    pub object_size: u64,
}

layout! { DiskReplica<S> { file_path, object_size } }

/// An object on a node's local disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalDiskReplica<S> {
    /// Client that owns the disk.
    pub client_id: Uuid,
    /// Size of the object in bytes.
    pub object_size: u64,
    /// Endpoint of the node as `host:port`.
    pub transport_endpoint: S,
}

layout! { LocalDiskReplica<S> { client_id, object_size, transport_endpoint } }

/// A part of a file of a distributed file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DfsReplica<S> {
    pub file_path: S,
    /// Offset of the object in the file, in bytes.
    pub offset: u64,
    /// Size of the object in bytes.
    pub object_size: u64,
    /// Allocated size in bytes, after alignment.
    pub aligned_size: u64,
    /// Index of the file system's shard.
    pub shard_index: i32,
}

layout! { DfsReplica<S> { file_path, offset, object_size, aligned_size, shard_index } }

/// Storage medium of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaMedium<S> {
    Memory(BufferDescriptor<S>),
    /// An NVMe-oF disk. Since 0.3.11.
    Nof(BufferDescriptor<S>),
    Disk(DiskReplica<S>),
    LocalDisk(LocalDiskReplica<S>),
    /// A distributed file system. Since 0.3.13.
    Dfs(DfsReplica<S>),
}

/// The alternatives of [`ReplicaMedium`] in wire order, each with its name and first release.
const MEDIA: [(&str, Dialect); 5] = [
    ("memory replica", Dialect::OLDEST),
    ("NVMe-oF replica", Dialect::V0_3_11),
    ("disk replica", Dialect::OLDEST),
    ("local disk replica", Dialect::OLDEST),
    ("DFS replica", Dialect::V0_3_13),
];

impl<S> ReplicaMedium<S> {
    fn ordinal(&self) -> usize {
        match self {
            Self::Memory(_) => 0,
            Self::Nof(_) => 1,
            Self::Disk(_) => 2,
            Self::LocalDisk(_) => 3,
            Self::Dfs(_) => 4,
        }
    }

    /// Whether a release supports this medium. If not, a reply in that dialect must omit the replica.
    pub fn exists_in(&self, dialect: Dialect) -> bool {
        MEDIA.get(self.ordinal()).is_some_and(|(_, since)| dialect >= *since)
    }
}

/// The literal of a struct with a `T` as its only field: Mooncake wraps buffers in such a struct.
fn wrapped_literal<T: Pack>(dialect: Dialect, out: &mut Vec<u8>) {
    out.push(type_marker::STRUCT);
    T::literal(dialect, out);
    out.push(type_marker::END);
}

impl<S: Pack> Pack for ReplicaMedium<S> {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        let literals: [fn(Dialect, &mut Vec<u8>); MEDIA.len()] = [
            wrapped_literal::<BufferDescriptor<S>>,
            wrapped_literal::<BufferDescriptor<S>>,
            DiskReplica::<S>::literal,
            LocalDiskReplica::<S>::literal,
            DfsReplica::<S>::literal,
        ];
        out.push(type_marker::VARIANT);
        for (literal, (_, since)) in literals.iter().zip(MEDIA) {
            if dialect >= since {
                literal(dialect, out);
            }
        }
        out.push(type_marker::END);
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        let (dialect, ordinal) = (writer.dialect(), self.ordinal());
        let mut index = 0_u8;
        for (position, (what, since)) in MEDIA.into_iter().enumerate() {
            let exists = dialect >= since;
            if position == ordinal {
                if !exists {
                    return Err(PackError::NotInDialect { what, dialect });
                }
                break;
            }
            index += u8::from(exists);
        }
        index.write(writer)?;
        match self {
            Self::Memory(buffer) | Self::Nof(buffer) => buffer.write(writer),
            Self::Disk(replica) => replica.write(writer),
            Self::LocalDisk(replica) => replica.write(writer),
            Self::Dfs(replica) => replica.write(writer),
        }
    }

    fn has_compatible(dialect: Dialect) -> bool {
        BufferDescriptor::<S>::has_compatible(dialect)
    }

    fn write_compatible(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        match self {
            Self::Memory(buffer) | Self::Nof(buffer) => buffer.write_compatible(writer),
            Self::Disk(_) | Self::LocalDisk(_) | Self::Dfs(_) => Ok(()),
        }
    }
}

impl<'a, S: WireString<'a>> Unpack<'a> for ReplicaMedium<S> {
    fn min_size(dialect: Dialect) -> usize {
        // A disk replica is the smallest.
        1 + DiskReplica::<S>::min_size(dialect)
    }

    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
        let (dialect, index) = (reader.dialect(), reader.byte()?);
        let mut present = (0..MEDIA.len())
            .filter(|ordinal| MEDIA.get(*ordinal).is_some_and(|(_, since)| dialect >= *since));
        match present.nth(usize::from(index)) {
            Some(0) => reader.read().map(Self::Memory),
            Some(1) => reader.read().map(Self::Nof),
            Some(2) => reader.read().map(Self::Disk),
            Some(3) => reader.read().map(Self::LocalDisk),
            Some(4) => reader.read().map(Self::Dfs),
            _ => Err(UnpackError::VariantIndex(index)),
        }
    }

    fn read_compatible(&mut self, reader: &mut PackReader<'a>) -> Result<(), UnpackError> {
        match self {
            Self::Memory(buffer) | Self::Nof(buffer) => buffer.read_compatible(reader),
            Self::Disk(_) | Self::LocalDisk(_) | Self::Dfs(_) => Ok(()),
        }
    }
}

/// One replica of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaDescriptor<S> {
    /// Replica id, unique within a master.
    pub id: u64,
    pub medium: ReplicaMedium<S>,
    pub status: ReplicaStatus,
}

layout! { ReplicaDescriptor<S> { id, medium, status } }

/// Replicas of an object, and the duration of the lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaList<S> {
    /// The readable replicas of the object.
    pub replicas: Vec<ReplicaDescriptor<S>>,
    /// Duration of the lease in milliseconds, during which the object is neither evicted nor removed.
    pub lease_ttl_ms: u64,
    /// Checksum that the writer supplied, if any. Since 0.3.13.
    pub object_checksum: Option<u64>,
    /// Tenant in which the object was found. Since 0.3.14.
    pub resolved_tenant_id: Option<S>,
}

layout! {
    ReplicaList<S> { replicas, lease_ttl_ms, object_checksum since V0_3_13 }
    compatible since V0_3_14 { resolved_tenant_id }
}
