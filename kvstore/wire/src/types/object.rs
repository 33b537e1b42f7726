//! What a writer says about an object.

use crate::dialect::Dialect;
use crate::pack::{
    Pack, PackError, PackReader, PackWriter, Unpack, UnpackError, WireString, field_literal, field_min_size,
    layout, wire_code,
};

wire_code! {
    /// What to do with an object's soft pin, which keeps it from being evicted while others can be.
    pub struct SoftPinAction(u8) {
        /// Leave it as it is.
        PRESERVE = 0,
        /// Pin the object.
        ENABLE = 1,
        /// Unpin the object.
        DISABLE = 2,
    }
}

wire_code! {
    /// What an object is.
    pub struct DataType(u8) {
        /// Not told.
        UNKNOWN = 0,
        /// Keys and values of attention.
        KVCACHE = 1,
        /// Some tensor.
        TENSOR = 2,
        /// A model's weights.
        WEIGHT = 3,
        /// Training samples.
        SAMPLE = 4,
        /// Activations.
        ACTIVATION = 5,
        /// Gradients.
        GRADIENT = 6,
        /// An optimizer's state.
        OPTIMIZER_STATE = 7,
        /// Metadata.
        METADATA = 8,
        /// Anything else.
        GENERAL = 9,
    }
}

/// A soft pin and how long it lasts. Until 0.3.12 only a flag: pinned or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SoftPin {
    /// What to do.
    pub action: SoftPinAction,
    /// How long the pin lasts, in milliseconds; the master's default if absent.
    pub ttl_ms: Option<u64>,
}

/// In the configuration's literal this is not a member of its own, but the members that it stands for.
impl Pack for SoftPin {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        if dialect < Dialect::V0_3_13 {
            return bool::literal(dialect, out);
        }
        field_literal(|it: &Self| &it.action, dialect, out);
        field_literal(|it: &Self| &it.ttl_ms, dialect, out);
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
        field_min_size(|it: &Self| &it.action, dialect) + field_min_size(|it: &Self| &it.ttl_ms, dialect)
    }

    fn read(reader: &mut PackReader<'_>) -> Result<Self, UnpackError> {
        if reader.dialect() < Dialect::V0_3_13 {
            let action = if reader.read()? { SoftPinAction::ENABLE } else { SoftPinAction::PRESERVE };
            return Ok(Self { action, ttl_ms: None });
        }
        Ok(Self { action: reader.read()?, ttl_ms: reader.read()? })
    }
}

/// How a writer wants an object to be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicateConfig<S> {
    /// Copies in memory.
    pub replica_num: u64,
    /// Copies on disks behind NVMe over fabrics. Since 0.3.11.
    pub nof_replica_num: u64,
    /// Copies in a distributed file system. Since 0.3.13.
    pub dfs_replica_num: u64,
    /// Whether others are evicted first.
    pub soft_pin: SoftPin,
    /// Whether it is never evicted. Since 0.3.10.post2.
    pub with_hard_pin: bool,
    /// Names of segments to try first.
    pub preferred_segments: Vec<S>,
    /// The name of a segment to try first; the older form of `preferred_segments`.
    pub preferred_segment: S,
    /// Names of NVMe-oF segments to try first. Since 0.3.11.
    pub preferred_nof_segments: Vec<S>,
    /// Whether to keep the parts of a batch on one node.
    pub prefer_alloc_in_same_node: bool,
    /// What the object is. Since 0.3.11.
    pub data_type: DataType,
    /// The writer's host. Since 0.3.12.
    pub host_id: S,
    /// For every object of a batch the group with which it is leased and evicted. Since 0.3.12.
    pub group_ids: Option<Vec<S>>,
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
        }
    }
}

/// What a writer says at the end of a put. Until 0.3.12 only the key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectMeta<S> {
    /// The object's key.
    pub key: S,
    /// Its checksum, if the writer made one. Since 0.3.13.
    pub object_checksum: Option<u64>,
}

/// The newest form of [`ChecksummedObjectMeta`].
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
