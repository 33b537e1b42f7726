//! Indices of the tables: a type for each table, so that an index of one is not used in another.

/// An index of a [`crate::slab::Slab`].
pub(crate) trait SlabIndex: Copy + Eq {
    fn from_slot(slot: u32) -> Self;

    fn slot(self) -> u32;
}

macro_rules! slab_index {
    ($(#[$attribute:meta])* $name:ident) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) struct $name(u32);

        impl $name {
            /// The index that no value has.
            pub(crate) const NONE: Self = Self(u32::MAX);
        }

        impl Default for $name {
            fn default() -> Self {
                Self::NONE
            }
        }

        impl SlabIndex for $name {
            fn from_slot(slot: u32) -> Self {
                Self(slot)
            }

            fn slot(self) -> u32 {
                self.0
            }
        }
    };
}

slab_index! {
    /// Entry of an object in its shard.
    EntryIndex
}
slab_index! {
    /// Group in its shard of the group table.
    GroupSlot
}
slab_index! {
    /// Block in the allocator of a segment.
    AllocatorBlockIndex
}

impl AllocatorBlockIndex {
    /// Stands in a block's list links for a block that is in use.
    pub(crate) const IN_USE: Self = Self(u32::MAX - 1);
}

/// Number of bits of a group's index that are its shard.
const GROUP_SHARD_BITS: u32 = 6;
/// Number of shards of the group table.
pub(crate) const GROUP_SHARDS: usize = 1 << GROUP_SHARD_BITS;

/// Group in the group table: its slot and its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupIndex(u32);

impl GroupIndex {
    /// The index of objects without a group.
    pub(crate) const NONE: Self = Self(u32::MAX);

    pub(crate) fn new(slot: GroupSlot, shard: usize) -> Self {
        Self(slot.0 << GROUP_SHARD_BITS | shard as u32)
    }

    pub(crate) fn shard(self) -> usize {
        self.0 as usize & (GROUP_SHARDS - 1)
    }

    pub(crate) fn slot(self) -> GroupSlot {
        GroupSlot(self.0 >> GROUP_SHARD_BITS)
    }
}

impl Default for GroupIndex {
    fn default() -> Self {
        Self::NONE
    }
}

/// Shard of the object table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ShardIndex(u16);

impl ShardIndex {
    pub(crate) const FIRST: Self = Self(0);

    /// A table has at most 65 536 shards.
    pub(crate) fn new(shard: usize) -> Self {
        Self(shard as u16)
    }

    pub(crate) fn get(self) -> usize {
        usize::from(self.0)
    }
}

/// Segment in the segment table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentIndex(u16);

impl SegmentIndex {
    /// The index that no segment has.
    pub(crate) const NONE: Self = Self(u16::MAX);

    /// `None` if the table has no slot for it.
    pub(crate) fn new(slot: usize) -> Option<Self> {
        u16::try_from(slot).ok().map(Self).filter(|index| *index != Self::NONE)
    }

    pub(crate) fn get(self) -> usize {
        usize::from(self.0)
    }
}

/// Tenant in the tenant table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct TenantIndex(u16);

impl TenantIndex {
    /// The tenant that owns everything while multi-tenancy is off.
    pub(crate) const DEFAULT: Self = Self(0);

    /// `None` if the table has no slot for it.
    pub(crate) fn new(slot: usize) -> Option<Self> {
        u16::try_from(slot).ok().map(Self)
    }

    pub(crate) fn get(self) -> usize {
        usize::from(self.0)
    }
}

/// Prefix in the prefix table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PrefixIndex(u8);

impl PrefixIndex {
    /// Keys without a prefix.
    pub(crate) const NO_PREFIX: Self = Self(0);
    /// All prefixes for which the table has no slot.
    pub(crate) const OTHERS: Self = Self(u8::MAX);

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).map(Self)
    }

    /// `None` if the table has no slot for it.
    pub(crate) fn new(slot: usize) -> Option<Self> {
        u8::try_from(slot).ok().map(Self)
    }

    pub(crate) fn get(self) -> usize {
        usize::from(self.0)
    }
}
