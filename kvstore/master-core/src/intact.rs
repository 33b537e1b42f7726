//! Intact ranges of a segment after its node's restart: replicas outside of them are lost.

use mooncake_wire::ErrorCode;

use crate::change::StateChangeSink;
use crate::master::MasterCore;
use crate::object::MemoryReplica;
use crate::requests::ClientSegment;

/// The intact ranges of a segment between two offsets.
#[derive(Clone, Copy, Debug)]
pub struct IntactRanges<'a> {
    /// Start of the reported part of the segment.
    pub from: u64,
    /// End of the reported part of the segment (exclusive).
    pub to: u64,
    /// Start offsets of the intact ranges, ascending. The ranges are not adjacent.
    pub starts: &'a [u64],
    /// End offsets of the intact ranges (exclusive); the last one may exceed `to`.
    pub ends: &'a [u64],
}

impl IntactRanges<'_> {
    fn contains(&self, offset: u64, size: u64) -> bool {
        let after = self.starts.partition_point(|start| *start <= offset);
        let end = after.checked_sub(1).and_then(|index| self.ends.get(index));
        end.zip(offset.checked_add(size)).is_some_and(|(range_end, end)| end <= *range_end)
    }
}

impl MasterCore {
    /// Drops the replicas that are not within intact ranges of a node's memory. Returns their number.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, `ILLEGAL_CLIENT` if another client owns the segment.
    pub fn retain_intact(
        &self,
        now_ms: u64,
        segment: ClientSegment,
        intact: IntactRanges<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<u64, ErrorCode> {
        // The registry lock prevents unmounting in the meantime.
        let _registry = self.registry.lock();
        self.objects.segments.load().own_segment(segment)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let segment_index =
            self.objects.segments.load().index_of(segment.segment).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let is_torn = |replica: &MemoryReplica, size: u64| {
            replica.segment == segment_index
                && replica.ready
                && (intact.from..intact.to).contains(&replica.offset)
                && !intact.contains(replica.offset, size)
        };
        Ok(self
            .objects
            .shard_indices()
            .map(|shard| self.objects.lock(shard).drop_replicas(is_torn, now_ms, fx))
            .sum())
    }
}
