//! Where the bytes of an object are.

use super::Uuid;
use crate::dialect::Dialect;
use crate::pack::{
    Pack, PackError, PackReader, PackWriter, Unpack, UnpackError, WireString, layout, type_marker, wire_code,
};

wire_code! {
    /// Which replicas an operation is about.
    pub struct ReplicaType(i32) {
        /// Those in memory.
        MEMORY = 0,
        /// Those in files of a shared file system.
        DISK = 1,
        /// Those on a node's own disk.
        LOCAL_DISK = 2,
        /// Those on disks behind NVMe over fabrics.
        NOF_SSD = 3,
        /// All that a client writes in one put.
        ALL = 4,
        /// Those in a distributed file system.
        DFS = 100,
    }
}

wire_code! {
    /// How far a replica is.
    pub struct ReplicaStatus(i32) {
        /// Not set.
        UNDEFINED = 0,
        /// It has space.
        INITIALIZED = 1,
        /// It is being written.
        PROCESSING = 2,
        /// It can be read.
        COMPLETE = 3,
        /// It has been removed.
        REMOVED = 4,
        /// Writing failed.
        FAILED = 5,
    }
}

/// A range of a node's memory, or of a disk that is addressed in the same way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BufferDescriptor<S> {
    /// Bytes.
    pub size: u64,
    /// Address in the node that has it.
    pub address: u64,
    /// How to reach it, for example `tcp` or `rdma`.
    pub protocol: S,
    /// Where to reach it: the node's `host:port`.
    pub endpoint: S,
}

layout! { BufferDescriptor<S> { size, address, protocol, endpoint } }

/// A file of a shared file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskReplica<S> {
    /// The file's path.
    pub file_path: S,
    /// Bytes of the object.
    pub object_size: u64,
}

layout! { DiskReplica<S> { file_path, object_size } }

/// An object on a node's own disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalDiskReplica<S> {
    /// The client whose disk it is.
    pub client_id: Uuid,
    /// Bytes of the object.
    pub object_size: u64,
    /// The node's `host:port`.
    pub transport_endpoint: S,
}

layout! { LocalDiskReplica<S> { client_id, object_size, transport_endpoint } }

/// A part of a file of a distributed file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DfsReplica<S> {
    /// The file's path.
    pub file_path: S,
    /// Where in the file the object begins, in bytes.
    pub offset: u64,
    /// Bytes of the object.
    pub object_size: u64,
    /// Bytes that it takes up.
    pub aligned_size: u64,
    /// Which of the file system's shards.
    pub shard_index: i32,
}

layout! { DfsReplica<S> { file_path, offset, object_size, aligned_size, shard_index } }

/// What holds a replica's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaMedium<S> {
    /// A node's memory.
    Memory(BufferDescriptor<S>),
    /// A disk behind NVMe over fabrics. Since 0.3.11.
    Nof(BufferDescriptor<S>),
    /// A shared file system.
    Disk(DiskReplica<S>),
    /// A node's own disk.
    LocalDisk(LocalDiskReplica<S>),
    /// A distributed file system. Since 0.3.13.
    Dfs(DfsReplica<S>),
}

/// The alternatives of [`ReplicaMedium`] in the order of the wire, each with its name and first release.
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

    /// Whether a release knows this kind of replica. If not, a reply in that dialect must leave it out.
    pub fn exists_in(&self, dialect: Dialect) -> bool {
        MEDIA.get(self.ordinal()).is_some_and(|(_, since)| dialect >= *since)
    }
}

/// The literal of a struct whose only member is a `T`, in which Mooncake wraps buffers here.
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
        for (at, (what, since)) in MEDIA.into_iter().enumerate() {
            let exists = dialect >= since;
            if at == ordinal {
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
}

impl<'a, S: WireString<'a>> Unpack<'a> for ReplicaMedium<S> {
    fn min_size(dialect: Dialect) -> usize {
        // A disk replica is the smallest.
        1 + DiskReplica::<S>::min_size(dialect)
    }

    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
        let (dialect, index) = (reader.dialect(), reader.byte()?);
        let mut present =
            (0..MEDIA.len()).filter(|at| MEDIA.get(*at).is_some_and(|(_, since)| dialect >= *since));
        match present.nth(usize::from(index)) {
            Some(0) => reader.read().map(Self::Memory),
            Some(1) => reader.read().map(Self::Nof),
            Some(2) => reader.read().map(Self::Disk),
            Some(3) => reader.read().map(Self::LocalDisk),
            Some(4) => reader.read().map(Self::Dfs),
            _ => Err(UnpackError::VariantIndex(index)),
        }
    }
}

/// One copy of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaDescriptor<S> {
    /// Unique within a master.
    pub id: u64,
    /// Where it is.
    pub medium: ReplicaMedium<S>,
    /// How far it is.
    pub status: ReplicaStatus,
}

layout! { ReplicaDescriptor<S> { id, medium, status } }

/// Where to read an object, and for how long that is certain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaList<S> {
    /// The copies that can be read.
    pub replicas: Vec<ReplicaDescriptor<S>>,
    /// Milliseconds for which the object is neither evicted nor removed.
    pub lease_ttl_ms: u64,
    /// The writer's checksum of the object, if it gave one. Since 0.3.13.
    pub object_checksum: Option<u64>,
}

layout! { ReplicaList<S> { replicas, lease_ttl_ms, object_checksum since V0_3_13 } }
