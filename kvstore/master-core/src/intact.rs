//! Which parts of a segment are whole, as its node knows after a restart: what is on others is gone.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;

use crate::change::StateChangeSink;
use crate::master::MasterCore;
use crate::object::MemoryReplica;

/// Parts of a segment between two offsets.
#[derive(Clone, Copy, Debug)]
pub struct IntactRanges<'a> {
    /// The first offset that this is about.
    pub from: u64,
    /// The offset before which it ends.
    pub to: u64,
    /// Where whole parts begin, in ascending order. They do not touch one another.
    pub starts: &'a [u64],
    /// Where each of them ends; the last perhaps after `to`.
    pub ends: &'a [u64],
}

impl IntactRanges<'_> {
    fn contains(&self, offset: u64, size: u64) -> bool {
        let after = self.starts.partition_point(|start| *start <= offset);
        let end = after.checked_sub(1).and_then(|at| self.ends.get(at));
        end.zip(offset.checked_add(size)).is_some_and(|(end, over)| over <= *end)
    }
}

impl MasterCore {
    /// A node has lost what is not on whole parts of its memory. Returns how many replicas that are.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, `ILLEGAL_CLIENT` if it is another's.
    pub fn retain_intact(
        &self,
        now_ms: u64,
        segment: Uuid,
        client: Uuid,
        whole: IntactRanges<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<u64, ErrorCode> {
        // So that it does not go away meanwhile.
        let _registry = self.registry.lock();
        self.own_segment(segment, client)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let place = self.segments.load().index_of(segment).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let is_torn = |replica: &MemoryReplica, size: u64| {
            replica.segment == place
                && replica.ready
                && (whole.from..whole.to).contains(&replica.offset)
                && !whole.contains(replica.offset, size)
        };
        Ok((0..self.shards.len()).map(|shard| self.lock(shard).drop_replicas(is_torn, now_ms, fx)).sum())
    }
}
