//! The part of a segment in which a shard allocates.

use mooncake_wire::types::{NofSegment, Segment};

use crate::{ShardCount, ShardIndex};

/// Parts start at multiples of this in their segment, so that objects in them are aligned to pages.
const ALIGNMENT: u64 = 4096;

/// Offset and size of a shard's part of a segment of `size` bytes. Parts are equal but for the last, which also has the rest. All but
/// the last are empty if the segment is smaller than a page per shard.
pub fn segment_part(size: u64, shard: ShardIndex, shards: ShardCount) -> (u64, u64) {
    let count = shards.get() as u64;
    let part = size / count / ALIGNMENT * ALIGNMENT;
    let offset = part * shard as u64;
    (offset, if shard as u64 + 1 == count { size - offset } else { part })
}

/// A segment that can be divided. The parts have its id and its name, each in another shard.
pub(crate) trait DivisibleSegment: Clone {
    /// The shard's part; `None` if it is empty. An empty segment is that of the first shard, which refuses it.
    fn part(&self, shard: ShardIndex, shards: ShardCount) -> Option<Self>;
}

macro_rules! divisible {
    ($($segment:ident)+) => {$(
        impl<S: Clone> DivisibleSegment for $segment<S> {
            fn part(&self, shard: ShardIndex, shards: ShardCount) -> Option<Self> {
                let (offset, size) = segment_part(self.size, shard, shards);
                // An overflow is in the whole segment already, which a master refuses: it gets it as it is.
                let base = self.base.checked_add(offset);
                base.map_or_else(|| Some(self.clone()), |base| (size > 0 || self.size == 0 && shard == 0).then(|| Self { base, size, ..self.clone() }))
            }
        }
    )+};
}

divisible! { Segment NofSegment }

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_cover_a_segment_without_overlap(size in any::<u64>(), count in 1..=256_usize) {
            let shards = ShardCount::new(count).unwrap();
            let mut end = 0;
            for shard in shards.iter() {
                let (offset, part) = segment_part(size, shard, shards);
                prop_assert_eq!(offset, end);
                prop_assert_eq!(offset % ALIGNMENT, 0);
                end += part;
            }
            prop_assert_eq!(end, size);
        }
    }
}
