//! Eviction: the least valuable objects first, groups as a whole, soft-pinned objects last.

use std::sync::atomic::Ordering::Relaxed;

use crate::allocator::rounded;
use crate::change::{RemoveCause, StateChangeSink};
use crate::eviction_candidates::{EvictionCandidate, EvictionCandidates};
use crate::eviction_decision::{EvictedGroup, EvictionDecision, EvictionPass};
use crate::group::GroupMember;
use crate::indices::{EntryIndex, GroupIndex, SegmentIndex, ShardIndex, TenantIndex};
use crate::locked_shard::LockedShard;
use crate::object::EvictionQueue;
use crate::object_table::ObjectTable;
use crate::recent_writes::WriteProtection;
use crate::segment::AllocatedSpace;
use crate::statistics::MasterCounters;

/// Maximum number of entries per queue scanned to free space for a tenant.
const TENANT_SCAN_LIMIT: usize = 4096;

/// Maximum number of objects that one round skips because they wait for a disk.
const MAX_DEFERRED: u64 = 1024;
/// How long such an object is skipped, in milliseconds.
const DEFER_MS: u64 = 200;

/// Totals of one round of eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EvictionResult {
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
    /// Objects being offloaded to a disk instead.
    pub(crate) offloaded: u64,
    /// Objects that must wait until others have been offloaded.
    pub(crate) deferred: u64,
}

/// A round of eviction.
struct EvictionRound {
    now_ms: u64,
    pass: EvictionPass,
    /// Goal of the round.
    bytes: u64,
    result: EvictionResult,
    /// Candidates of the pass; `None` before it has begun.
    candidates: Option<EvictionCandidates>,
}

impl EvictionRound {
    fn new(now_ms: u64, bytes: u64) -> Self {
        Self {
            now_ms,
            pass: EvictionPass::Unpinned,
            bytes,
            result: EvictionResult::default(),
            candidates: None,
        }
    }

    fn begin_pass(&mut self, pass: EvictionPass) {
        (self.pass, self.candidates) = (pass, None);
    }

    /// Whether continuing can free more.
    fn can_continue(&self) -> bool {
        self.result.deferred < MAX_DEFERRED
    }
}

impl ObjectTable {
    /// Evicts objects with at least `size` bytes in total. Returns false if nothing could be evicted, or if no segment has that size.
    pub(crate) fn evict_for_size(&self, now_ms: u64, size: u64, fx: &mut dyn StateChangeSink) -> bool {
        let Some(size) = rounded(size) else { return false };
        if !self
            .segments
            .load()
            .iter()
            .any(|(_, segment)| segment.is_writable() && segment.descriptor.size >= size)
        {
            return false;
        }
        let evicted = self.evict(now_ms, size, fx);
        evicted.bytes > 0
    }

    /// Evicts at least `bytes`, unpinned objects first.
    fn evict(&self, now_ms: u64, bytes: u64, fx: &mut dyn StateChangeSink) -> EvictionResult {
        MasterCounters::add(&self.counters.attempted_evictions, 1);
        let mut round = EvictionRound::new(now_ms, bytes);
        let passes = [EvictionPass::Unpinned, EvictionPass::SoftPinned];
        let passes = if self.settings.evict_soft_pinned { &passes[..] } else { &passes[..1] };
        for pass in passes {
            round.begin_pass(*pass);
            while round.result.bytes < bytes && round.can_continue() {
                if !self.evict_next(&mut round, fx) {
                    break;
                }
            }
        }
        self.count_evicted(round.result);
        round.result
    }

    /// Evicts a share of all objects if usage is above the high watermark. The share grows with usage; soft-pinned objects are
    /// evicted only as far as needed.
    pub(crate) fn evict_above_watermark(&self, now_ms: u64, fx: &mut dyn StateChangeSink) -> EvictionResult {
        let settings = &self.settings;
        let AllocatedSpace { used, capacity } = self.segments.load().usage();
        // Objects being offloaded will leave memory, too.
        let offloading =
            if self.offloads_evicted() { self.disk_task_totals.offloading.load(Relaxed) } else { 0 };
        let used = used.saturating_sub(offloading);
        let over = used as f64 / capacity.max(1) as f64 - settings.high_watermark;
        if over <= 0.0 {
            return EvictionResult::default();
        }
        MasterCounters::add(&self.counters.attempted_evictions, 1);
        let share = settings.eviction_ratio.max(over + settings.eviction_ratio).min(1.0);
        let objects = self.key_count() as f64;
        let (target, minimum) = ((share * objects).ceil(), ((share / 2.0).max(over) * objects).ceil());
        let bytes = (over * capacity as f64) as u64;
        let mut round = EvictionRound::new(now_ms, bytes);
        self.evict_keys(&mut round, target as u64, fx);
        if settings.evict_soft_pinned {
            round.begin_pass(EvictionPass::SoftPinned);
            self.evict_keys(&mut round, minimum as u64, fx);
        }
        self.count_evicted(round.result);
        round.result
    }

    /// Continues a round until it has evicted this number of objects.
    fn evict_keys(&self, round: &mut EvictionRound, keys: u64, fx: &mut dyn StateChangeSink) {
        while round.result.keys + round.result.offloaded < keys && round.can_continue() {
            if !self.evict_next(round, fx) {
                break;
            }
        }
    }

    fn count_evicted(&self, result: EvictionResult) {
        MasterCounters::add(&self.counters.evicted_keys, result.keys);
        MasterCounters::add(&self.counters.evicted_bytes, result.bytes);
        MasterCounters::add(&self.counters.eviction_rounds, u64::from(result.keys > 0));
    }

    /// Whether evicted objects are offloaded to disks.
    fn offloads_evicted(&self) -> bool {
        self.settings.disks.is_some_and(|tier| tier.on_evict)
    }

    /// Evicts the least valuable object with its group. Returns false if nothing is evictable.
    fn evict_next(&self, round: &mut EvictionRound, fx: &mut dyn StateChangeSink) -> bool {
        let EvictionRound { now_ms, pass, .. } = *round;
        let protected = self.recent_writes.protected(now_ms, self.settings.lease_ttl_ms);
        let mut is_complete = round.candidates.is_none();
        let mut candidates =
            round.candidates.take().unwrap_or_else(|| EvictionCandidates::new(self, pass, protected, now_ms));
        let is_evicted = loop {
            let Some(EvictionCandidate { queue, oldest, .. }) = candidates.first() else {
                // Other queues may have got entries since the candidates were collected.
                if is_complete {
                    break false;
                }
                candidates.collect(self, protected, now_ms);
                is_complete = true;
                continue;
            };
            let is_evicted = self.evict_first(oldest.shard, queue, protected, round, fx);
            candidates.replace(self, queue, protected, now_ms);
            if is_evicted {
                break true;
            }
        };
        round.candidates = Some(candidates);
        is_evicted
    }

    /// Evicts the first object of one queue of a shard, or moves it to where it belongs.
    fn evict_first(
        &self,
        shard: ShardIndex,
        queue: EvictionQueue,
        protected: WriteProtection,
        round: &mut EvictionRound,
        fx: &mut dyn StateChangeSink,
    ) -> bool {
        let EvictionRound { now_ms, pass, .. } = *round;
        let mut shard = self.lock(shard);
        let Some((index, decision)) = shard.decide_first(queue, pass, protected, now_ms) else {
            return false;
        };
        match decision {
            EvictionDecision::Empty => {}
            EvictionDecision::Evict => {
                shard.evict_entry(index, round, fx);
                return true;
            }
            EvictionDecision::DeferUntil(until_ms) => shard.postpone(index, until_ms),
            EvictionDecision::SoftPinned => shard.enqueue(index, EvictionQueue::SoftPinned),
            EvictionDecision::Unresponsive => shard.enqueue(index, EvictionQueue::Unlisted),
            EvictionDecision::EvictWith(group) => {
                let first = GroupMember { shard: shard.shard_index, index };
                drop(shard);
                let before = round.result;
                self.evict_group(first, &group, round, fx);
                return before != round.result;
            }
        }
        false
    }

    /// Evicts a group if all of its members may be evicted. If not, its first member is requeued for when that may have changed.
    fn evict_group(
        &self,
        first: GroupMember,
        group: &EvictedGroup,
        round: &mut EvictionRound,
        fx: &mut dyn StateChangeSink,
    ) {
        let EvictionRound { now_ms, pass, .. } = *round;
        let EvictedGroup { index: group, members } = group;
        let decisions =
            members.iter().map(|member| self.lock(member.shard).decide_member(*member, *group, pass, now_ms));
        let mut retry_ms = None;
        for decision in decisions {
            match decision {
                EvictionDecision::DeferUntil(until) => {
                    retry_ms = Some(retry_ms.map_or(until, |retry: u64| retry.max(until)));
                }
                EvictionDecision::SoftPinned => retry_ms = retry_ms.or(Some(0)),
                EvictionDecision::Unresponsive => {
                    retry_ms = Some(retry_ms.unwrap_or(0).max(self.retry_at(now_ms)));
                }
                EvictionDecision::Evict | EvictionDecision::EvictWith(..) | EvictionDecision::Empty => {}
            }
        }
        if let Some(until_ms) = retry_ms {
            let mut shard = self.lock(first.shard);
            if shard.is_member(first, *group) && !shard.entries[first.index].is_leased(now_ms) {
                match until_ms {
                    0 => shard.enqueue(first.index, EvictionQueue::SoftPinned),
                    _ => shard.postpone(first.index, until_ms),
                }
            }
            return;
        }
        for member in members {
            let mut shard = self.lock(member.shard);
            // It may have been leased in the meantime.
            if matches!(shard.decide_member(*member, *group, pass, now_ms), EvictionDecision::Evict) {
                shard.evict_entry(member.index, round, fx);
            }
        }
    }

    /// Minimum bytes that one round frees, assuming objects of equal size.
    fn round_bytes(&self) -> u64 {
        (self.settings.eviction_ratio * self.capacity() as f64) as u64
    }

    /// Evicts a tenant's own objects to free quota. Returns false if none could be evicted.
    pub(crate) fn evict_for_tenant(
        &self,
        now_ms: u64,
        tenant: TenantIndex,
        bytes: u64,
        fx: &mut dyn StateChangeSink,
    ) -> bool {
        MasterCounters::add(&self.counters.attempted_evictions, 1);
        let mut round = EvictionRound::new(now_ms, bytes);
        for shard in self.shard_indices() {
            let mut shard = self.lock(shard);
            let stamp = |queue| shard.head(queue).map(|index| shard.entries[index].stamp);
            let mut queues = self.unpinned_queues_by_value(stamp, now_ms);
            queues.extend(self.settings.evict_soft_pinned.then_some(EvictionQueue::SoftPinned));
            for queue in queues {
                let mut next = shard.head(queue);
                for _ in 0..TENANT_SCAN_LIMIT {
                    let Some(index) = next else { break };
                    next = shard.next_in_list(index);
                    let entry = &shard.entries[index];
                    if entry.tenant != tenant || entry.is_leased(now_ms) || entry.group != GroupIndex::NONE {
                        continue;
                    }
                    shard.evict_entry(index, &mut round, fx);
                    if round.result.bytes >= bytes {
                        break;
                    }
                }
            }
            if round.result.bytes >= bytes {
                break;
            }
        }
        self.count_evicted(round.result);
        round.result.bytes > 0
    }

    /// Removes expired soft pins in one shard.
    pub(crate) fn expire_soft_pins(&self, now_ms: u64, shard: ShardIndex) {
        let mut shard = self.lock(shard);
        let mut next = shard.head(EvictionQueue::SoftPinned);
        while let Some(index) = next {
            next = shard.next_in_list(index);
            let queue = shard.entries[index].target_queue(now_ms);
            if queue != EvictionQueue::SoftPinned {
                shard.enqueue(index, queue);
            }
        }
    }
}

impl LockedShard<'_> {
    /// Requeues entries that were unlisted while a segment was silent.
    pub(crate) fn requeue_recovered(&mut self, segment: SegmentIndex, now_ms: u64) {
        let indices = self.all_occupied();
        let is_unlisted = |index: &EntryIndex| {
            let entry = &self.entries[*index];
            entry.queue() == EvictionQueue::Unlisted
                && entry.replicas().any(|replica| replica.segment == segment)
        };
        let unlisted: Vec<EntryIndex> = indices.filter(is_unlisted).collect();
        for index in unlisted {
            let queue = self.entries[index].target_queue(now_ms);
            self.enqueue(index, queue);
        }
    }

    /// Evicts an object. With a disk copy, only its memory replicas are removed; if evicted objects are offloaded, it is offloaded
    /// first.
    fn evict_entry(&mut self, index: EntryIndex, round: &mut EvictionRound, fx: &mut dyn StateChangeSink) {
        let EvictionRound { now_ms, bytes, result, .. } = round;
        let entry = &self.entries[index];
        if entry.copy().is_some() {
            result.bytes += self.drop_memory_replicas(index, fx);
            result.keys += 1;
            return;
        }
        let Some(tier) = self.objects.settings.disks.filter(|tier| tier.on_evict) else {
            return self.evict_permanently(index, result, fx);
        };
        if tier.force_evict && result.offloaded as f64 >= tier.queue_limit as f64 * tier.cap_ratio {
            return self.evict_permanently(index, result, fx);
        }
        // Enough bytes are being offloaded already and will leave memory soon.
        let is_enough = self.objects.disk_task_totals.offloading.load(Relaxed)
            >= (*bytes).max(self.objects.round_bytes());
        let source = if is_enough { None } else { self.offload(index, *now_ms).ok() };
        match source {
            Some(source) => {
                result.offloaded += 1;
                result.bytes += self.retain_replica(index, source, fx);
            }
            None if tier.force_evict && !is_enough => self.evict_permanently(index, result, fx),
            None => {
                result.deferred += 1;
                self.postpone(index, now_ms.saturating_add(DEFER_MS));
            }
        }
    }

    fn evict_permanently(
        &mut self,
        index: EntryIndex,
        result: &mut EvictionResult,
        fx: &mut dyn StateChangeSink,
    ) {
        result.bytes += self.remove_and_free(index, RemoveCause::Evicted, fx);
        result.keys += 1;
    }

    fn postpone(&mut self, index: EntryIndex, until_ms: u64) {
        self.entries[index].stamp = until_ms;
        let queue = if self.entries[index].queue() == EvictionQueue::SoftPinned {
            EvictionQueue::SoftPinned
        } else {
            EvictionQueue::Leased(self.entries[index].queue().class())
        };
        self.enqueue(index, queue);
    }
}
