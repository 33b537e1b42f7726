//! Objects as a writer describes them.

use crate::dialect::Dialect;
use crate::pack::{
    Pack, PackError, PackReader, PackWriter, Unpack, UnpackError, WireString, field_literal, field_min_size,
    layout, wire_code,
};

wire_code! {
    /// Change of an object's soft pin, which lets it be evicted only after unpinned objects.
    pub struct SoftPinAction(u8) {
        PRESERVE = 0,
        ENABLE = 1,
        DISABLE = 2,
    }
}

wire_code! {
    /// Type of an object's contents.
    pub struct DataType(u8) {
        UNKNOWN = 0,
        KVCACHE = 1,
        TENSOR = 2,
        WEIGHT = 3,
        SAMPLE = 4,
        ACTIVATION = 5,
        GRADIENT = 6,
        OPTIMIZER_STATE = 7,
        METADATA = 8,
        GENERAL = 9,
    }
}

/// A soft pin and its duration. Until 0.3.12 only a flag: pinned or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SoftPin {
    /// Change to the soft pin.
    pub action: SoftPinAction,
    /// Duration of the pin in milliseconds; the master's default if absent.
    pub ttl_ms: Option<u64>,
}

/// In the literal of the configuration this is not a struct: its two fields are inlined.
impl Pack for SoftPin {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        if dialect < Dialect::V0_3_13 {
            return bool::literal(dialect, out);
        }
        field_literal(|pin: &Self| &pin.action, dialect, out);
        field_literal(|pin: &Self| &pin.ttl_ms, dialect, out);
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        if writer.dialect() < Dialect::V0_3_13 {
            return (self.action == SoftPinAction::ENABLE).write(writer);
        }
        self.action.write(writer)?;
        self.ttl_ms.write(writer)
    }
}

impl Unpack<'_> for SoftPin {
    fn min_size(dialect: Dialect) -> usize {
        if dialect < Dialect::V0_3_13 {
            return bool::min_size(dialect);
        }
        field_min_size(|pin: &Self| &pin.action, dialect) + field_min_size(|pin: &Self| &pin.ttl_ms, dialect)
    }

    fn read(reader: &mut PackReader<'_>) -> Result<Self, UnpackError> {
        if reader.dialect() < Dialect::V0_3_13 {
            let action = if reader.read()? { SoftPinAction::ENABLE } else { SoftPinAction::PRESERVE };
            return Ok(Self { action, ttl_ms: None });
        }
        Ok(Self { action: reader.read()?, ttl_ms: reader.read()? })
    }
}

/// Replication settings of a put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicateConfig<S> {
    pub replica_num: u64,
    /// Number of replicas on NVMe-oF disks. Since 0.3.11.
    pub nof_replica_num: u64,
    /// Number of replicas in a distributed file system. Since 0.3.13.
    pub dfs_replica_num: u64,
    /// Soft pin: evicted after unpinned objects.
    pub soft_pin: SoftPin,
    /// Whether the object is excluded from eviction. Since 0.3.10.post2.
    pub with_hard_pin: bool,
    /// Names of segments that are tried first.
    pub preferred_segments: Vec<S>,
    /// Name of a segment that is tried first; the older form of `preferred_segments`.
    pub preferred_segment: S,
    /// Names of NVMe-oF segments that are tried first. Since 0.3.11.
    pub preferred_nof_segments: Vec<S>,
    /// Whether to place all objects of a batch on one node.
    pub prefer_alloc_in_same_node: bool,
    /// Type of the contents. Since 0.3.11.
    pub data_type: DataType,
    /// Host id of the writer. Since 0.3.12.
    pub host_id: S,
    /// Per object of a batch, the group that is leased and evicted as a whole. Since 0.3.12.
    pub group_ids: Option<Vec<S>>,
    /// Per object of a batch, the session (conversation) that it belongs to. Since 0.3.14.
    pub session_ids: Option<Vec<S>>,
    /// Names of network devices: segments of which the node has one of them are tried first. Since 0.3.14.
    pub preferred_hca_names: Option<Vec<S>>,
    /// As `preferred_hca_names`, per object of a batch. Since 0.3.14.
    pub per_key_preferred_hca_names: Option<Vec<Vec<S>>>,
    /// Per object of a batch, the id of objects that should be in the same tier of storage. Since 0.3.14.
    pub residency_affinity_ids: Option<Vec<S>>,
}

layout! { ReplicateConfig<S> {
    replica_num,
    nof_replica_num since V0_3_11,
    dfs_replica_num since V0_3_13,
    soft_pin,
    with_hard_pin since V0_3_10_post2,
    preferred_segments,
    preferred_segment,
    preferred_nof_segments since V0_3_11,
    prefer_alloc_in_same_node,
    data_type since V0_3_11,
    host_id since V0_3_12,
    group_ids since V0_3_12,
} compatible since V0_3_14 {
    session_ids,
    preferred_hca_names,
    per_key_preferred_hca_names,
    residency_affinity_ids,
} }

impl<S: Default> Default for ReplicateConfig<S> {
    fn default() -> Self {
        Self {
            replica_num: 1,
            nof_replica_num: 0,
            dfs_replica_num: 0,
            soft_pin: SoftPin::default(),
            with_hard_pin: false,
            preferred_segments: Vec::new(),
            preferred_segment: S::default(),
            preferred_nof_segments: Vec::new(),
            prefer_alloc_in_same_node: false,
            data_type: DataType::UNKNOWN,
            host_id: S::default(),
            group_ids: None,
            session_ids: None,
            preferred_hca_names: None,
            per_key_preferred_hca_names: None,
            residency_affinity_ids: None,
        }
    }
}

/// Metadata sent at the end of a put. Until 0.3.12 only the key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectMeta<S> {
    pub key: S,
    /// Checksum of the object, if the writer computed one. Since 0.3.13.
    pub object_checksum: Option<u64>,
}

/// The newest layout of [`super::ObjectMeta`].
mod checked {
    use crate::pack::layout;

    pub(super) struct ChecksummedObjectMeta<S> {
        pub(super) key: S,
        pub(super) object_checksum: Option<u64>,
    }

    layout! { ChecksummedObjectMeta<S> { key, object_checksum } }
}

impl<S: Pack> Pack for ObjectMeta<S> {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        if dialect < Dialect::V0_3_13 {
            S::literal(dialect, out);
        } else {
            checked::ChecksummedObjectMeta::<S>::literal(dialect, out);
        }
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        self.key.write(writer)?;
        if writer.dialect() < Dialect::V0_3_13 { Ok(()) } else { self.object_checksum.write(writer) }
    }
}

impl<'a, S: WireString<'a>> Unpack<'a> for ObjectMeta<S> {
    fn min_size(dialect: Dialect) -> usize {
        if dialect < Dialect::V0_3_13 {
            S::min_size(dialect)
        } else {
            checked::ChecksummedObjectMeta::<S>::min_size(dialect)
        }
    }

    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
        if reader.dialect() < Dialect::V0_3_13 {
            return Ok(Self { key: reader.read()?, object_checksum: None });
        }
        let checked::ChecksummedObjectMeta { key, object_checksum } = reader.read()?;
        Ok(Self { key, object_checksum })
    }
}
