//! Making room: what was read longest ago goes first, groups as a whole, and soft-pinned objects last.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::allocator::rounded;
use crate::change::{RemoveCause, StateChangeSink};
use crate::group::GroupMember;
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::EvictionQueue;
use crate::recent_writes::WriteProtection;
use crate::slab::NIL;
use crate::statistics::MasterCounters;

/// Entries of a shard that are looked at when a tenant needs room.
const TENANT_SCAN_LIMIT: usize = 4096;

/// Objects that one round passes over because they have to wait for a disk.
const MAX_DEFERRED: u64 = 1024;
/// For how long such an object is not looked at again, in milliseconds.
const DEFER_MS: u64 = 200;

/// What was evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EvictionResult {
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
    /// Objects that are on their way to a disk instead.
    pub(crate) offloaded: u64,
    /// Objects that should have gone, but have to wait until others are on a disk.
    pub(crate) deferred: u64,
}

impl EvictionResult {
    /// Whether anything can be expected of going on.
    fn made_progress(self) -> bool {
        self.deferred < MAX_DEFERRED
    }
}

/// Which objects may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EvictionPass {
    Unpinned,
    SoftPinned,
}

/// What is to be done with the first of a list.
enum EvictionDecision {
    /// It goes alone.
    Evict,
    /// It goes if these others may go too.
    EvictWith(u32, Vec<GroupMember>),
    /// It stays, and must not be looked at before this time.
    DeferUntil(u64),
    /// It stays as long as something is pinned softly.
    SoftPinned,
    /// It stays until one of its nodes is heard of again.
    Unresponsive,
    /// There is nothing to evict here.
    Empty,
}

impl MasterCore {
    /// Evicts until so many bytes may have become free somewhere. False if nothing could be evicted, or if no segment
    /// is large enough anyway.
    pub(crate) fn evict_for_size(&self, now_ms: u64, size: u64, fx: &mut dyn StateChangeSink) -> bool {
        let Some(size) = rounded(size) else { return false };
        if !self.segments.load().iter().any(|(_, it)| it.is_writable() && it.descriptor.size >= size) {
            return false;
        }
        let evicted = self.evict(now_ms, size, fx);
        evicted.bytes > 0
    }

    /// Evicts until so many bytes are free, first what is not pinned.
    fn evict(&self, now_ms: u64, bytes: u64, fx: &mut dyn StateChangeSink) -> EvictionResult {
        MasterCounters::add(&self.counters.attempted_evictions, 1);
        let mut sum = EvictionResult::default();
        let passes = [EvictionPass::Unpinned, EvictionPass::SoftPinned];
        let passes = if self.settings.evict_soft_pinned { &passes[..] } else { &passes[..1] };
        for pass in passes {
            while sum.bytes < bytes && sum.made_progress() {
                if !self.evict_oldest(now_ms, *pass, bytes, &mut sum, fx) {
                    break;
                }
            }
        }
        self.count_evicted(sum);
        sum
    }

    /// Evicts when the pool is nearly full: a share of all objects that grows with what is in use, of soft-pinned ones
    /// only what is needed.
    pub(crate) fn evict_above_watermark(&self, now_ms: u64, fx: &mut dyn StateChangeSink) -> EvictionResult {
        let settings = &self.settings;
        let (used, capacity) = self.segments.load().usage();
        // What is on its way to a disk will go, too.
        let leaving =
            if self.offloads_evicted() { self.disk_task_totals.offloading.load(Relaxed) } else { 0 };
        let used = used.saturating_sub(leaving);
        let over = used as f64 / capacity.max(1) as f64 - settings.high_watermark;
        if over <= 0.0 {
            return EvictionResult::default();
        }
        MasterCounters::add(&self.counters.attempted_evictions, 1);
        let share = settings.eviction_ratio.max(over + settings.eviction_ratio).min(1.0);
        let objects = self.key_count() as f64;
        let (target, least) = ((share * objects).ceil(), ((share / 2.0).max(over) * objects).ceil());
        let bytes = (over * capacity as f64) as u64;
        let mut sum = EvictionResult::default();
        self.evict_pass(now_ms, EvictionPass::Unpinned, (target as u64, bytes), &mut sum, fx);
        if settings.evict_soft_pinned {
            self.evict_pass(now_ms, EvictionPass::SoftPinned, (least as u64, bytes), &mut sum, fx);
        }
        self.count_evicted(sum);
        sum
    }

    fn evict_pass(
        &self,
        now_ms: u64,
        pass: EvictionPass,
        (keys, bytes): (u64, u64),
        sum: &mut EvictionResult,
        fx: &mut dyn StateChangeSink,
    ) {
        while sum.keys + sum.offloaded < keys && sum.made_progress() {
            if !self.evict_oldest(now_ms, pass, bytes, sum, fx) {
                break;
            }
        }
    }

    fn count_evicted(&self, sum: EvictionResult) {
        MasterCounters::add(&self.counters.evicted_keys, sum.keys);
        MasterCounters::add(&self.counters.evicted_bytes, sum.bytes);
        MasterCounters::add(&self.counters.eviction_rounds, u64::from(sum.keys > 0));
    }

    /// Whether objects go to disks when they would be evicted.
    fn offloads_evicted(&self) -> bool {
        self.settings.disks.is_some_and(|it| it.on_evict)
    }

    /// Evicts what was read longest ago, with its group. `bytes` is what the round is to free. False if nothing may go.
    fn evict_oldest(
        &self,
        now_ms: u64,
        pass: EvictionPass,
        bytes: u64,
        sum: &mut EvictionResult,
        fx: &mut dyn StateChangeSink,
    ) -> bool {
        let protected = self.recent_writes.protected(now_ms, self.settings.lease_ttl_ms);
        loop {
            let first = match pass {
                EvictionPass::Unpinned => {
                    let unread = oldest(&self.oldest_unread).filter(|(_, stamp)| !protected.contains(*stamp));
                    let leased = oldest(&self.oldest_leased);
                    unread.into_iter().chain(leased).min_by_key(|(_, stamp)| *stamp)
                }
                EvictionPass::SoftPinned => oldest(&self.oldest_soft),
            };
            let Some((shard, _)) = first.filter(|(_, stamp)| *stamp <= now_ms) else {
                return false;
            };
            let mut shard = self.lock(shard);
            let Some((at, verdict)) = shard.decide_first(pass, protected, now_ms) else { continue };
            match verdict {
                EvictionDecision::Empty => {}
                EvictionDecision::Evict => {
                    shard.evict_entry(at, now_ms, bytes, sum, fx);
                    return true;
                }
                EvictionDecision::DeferUntil(until_ms) => shard.postpone(at, until_ms),
                EvictionDecision::SoftPinned => shard.enqueue(at, EvictionQueue::SoftPinned),
                EvictionDecision::Unresponsive => shard.enqueue(at, EvictionQueue::Unlisted),
                EvictionDecision::EvictWith(group, members) => {
                    let first = GroupMember { shard: shard.shard_index as u32, index: at };
                    drop(shard);
                    let before = (sum.keys, sum.offloaded, sum.deferred);
                    self.evict_group(first, group, &members, (now_ms, pass, bytes), sum, fx);
                    if before != (sum.keys, sum.offloaded, sum.deferred) {
                        return true;
                    }
                }
            }
        }
    }

    /// Evicts a group if all of its members may go. If not, its first member is put where it will be looked at again
    /// when that may have changed.
    fn evict_group(
        &self,
        first: GroupMember,
        group: u32,
        members: &[GroupMember],
        (now_ms, pass, bytes): (u64, EvictionPass, u64),
        sum: &mut EvictionResult,
        fx: &mut dyn StateChangeSink,
    ) {
        let verdicts =
            members.iter().map(|it| self.lock(it.shard as usize).decide_member(*it, group, pass, now_ms));
        let mut stays = None;
        for verdict in verdicts {
            match verdict {
                EvictionDecision::DeferUntil(until) => {
                    stays = Some(stays.map_or(until, |it: u64| it.max(until)));
                }
                EvictionDecision::SoftPinned => stays = stays.or(Some(0)),
                EvictionDecision::Unresponsive => stays = Some(stays.unwrap_or(0).max(self.retry_at(now_ms))),
                EvictionDecision::Evict | EvictionDecision::EvictWith(..) | EvictionDecision::Empty => {}
            }
        }
        if let Some(until_ms) = stays {
            let mut shard = self.lock(first.shard as usize);
            if shard.is_member(first, group) && !shard.entries[first.index].is_leased(now_ms) {
                match until_ms {
                    0 => shard.enqueue(first.index, EvictionQueue::SoftPinned),
                    _ => shard.postpone(first.index, until_ms),
                }
            }
            return;
        }
        for member in members {
            let mut shard = self.lock(member.shard as usize);
            // Somebody may have read it in between.
            if matches!(shard.decide_member(*member, group, pass, now_ms), EvictionDecision::Evict) {
                shard.evict_entry(member.index, now_ms, bytes, sum, fx);
            }
        }
    }

    /// Bytes that one round of eviction frees at least, if all objects are of the same size.
    fn round_bytes(&self) -> u64 {
        (self.settings.eviction_ratio * self.capacity() as f64) as u64
    }

    /// When to look again at what could not go although nobody reads it. Until then it counts as leased.
    fn retry_at(&self, now_ms: u64) -> u64 {
        now_ms.saturating_add(self.settings.lease_ttl_ms.max(1))
    }

    /// Evicts a tenant's own objects, so that it gets below its quota. False if none could go.
    pub(crate) fn evict_for_tenant(
        &self,
        now_ms: u64,
        tenant: u16,
        bytes: u64,
        fx: &mut dyn StateChangeSink,
    ) -> bool {
        MasterCounters::add(&self.counters.attempted_evictions, 1);
        let mut sum = EvictionResult::default();
        for shard in 0..self.shards.len() {
            let mut shard = self.lock(shard);
            for queue in [EvictionQueue::Unread, EvictionQueue::Leased, EvictionQueue::SoftPinned] {
                if queue == EvictionQueue::SoftPinned && !self.settings.evict_soft_pinned {
                    continue;
                }
                let mut next = shard.head(queue);
                for _ in 0..TENANT_SCAN_LIMIT {
                    let Some(at) = next else { break };
                    next = shard.next_in_list(at);
                    let entry = &shard.entries[at];
                    if entry.tenant != tenant || entry.is_leased(now_ms) || entry.group != NIL {
                        continue;
                    }
                    shard.evict_entry(at, now_ms, bytes, &mut sum, fx);
                    if sum.bytes >= bytes {
                        break;
                    }
                }
            }
            if sum.bytes >= bytes {
                break;
            }
        }
        self.count_evicted(sum);
        sum.bytes > 0
    }

    /// Takes soft pins off whose time is over, in one shard.
    pub(crate) fn expire_soft_pins(&self, now_ms: u64, shard: usize) {
        let mut shard = self.lock(shard);
        let mut next = shard.head(EvictionQueue::SoftPinned);
        while let Some(at) = next {
            next = shard.next_in_list(at);
            let queue = shard.entries[at].target_queue(now_ms);
            if queue != EvictionQueue::SoftPinned {
                shard.enqueue(at, queue);
            }
        }
    }
}

fn oldest(stamps: &[AtomicU64]) -> Option<(usize, u64)> {
    stamps.iter().map(|stamp| stamp.load(Relaxed)).enumerate().min_by_key(|(_, stamp)| *stamp)
}

impl LockedShard<'_> {
    /// Puts back into their lists what was set apart while a segment was silent.
    pub(crate) fn requeue_recovered(&mut self, segment: u16, now_ms: u64) {
        let (places, _) = self.occupied(0, NIL);
        let is_apart = |at: &u32| {
            let entry = &self.entries[*at];
            entry.queue() == EvictionQueue::Unlisted && entry.replicas().any(|it| it.segment == segment)
        };
        let apart: Vec<u32> = places.filter(is_apart).collect();
        for at in apart {
            let queue = self.entries[at].target_queue(now_ms);
            self.enqueue(at, queue);
        }
    }

    /// The entry of this shard that is first to go, and what is to be done with it.
    fn decide_first(
        &self,
        pass: EvictionPass,
        protected: WriteProtection,
        now_ms: u64,
    ) -> Option<(u32, EvictionDecision)> {
        let queues = if pass == EvictionPass::Unpinned {
            &[EvictionQueue::Unread, EvictionQueue::Leased][..]
        } else {
            &[EvictionQueue::SoftPinned]
        };
        let heads = queues.iter().filter_map(|queue| self.head(*queue)).filter(|at| {
            let entry = &self.entries[*at];
            entry.queue() != EvictionQueue::Unread || !protected.contains(entry.stamp)
        });
        let at = heads.min_by_key(|at| self.entries[*at].stamp)?;
        let entry = &self.entries[at];
        if entry.stamp > now_ms {
            return Some((at, EvictionDecision::Empty));
        }
        if entry.group != NIL {
            let members = self.master.groups.members(entry.group);
            if members.len() > 1 {
                return Some((at, EvictionDecision::EvictWith(entry.group, members)));
            }
        }
        Some((at, self.decide_single(at, pass, now_ms)))
    }

    fn decide_single(&self, at: u32, pass: EvictionPass, now_ms: u64) -> EvictionDecision {
        let entry = &self.entries[at];
        match entry.queue() {
            EvictionQueue::Vacant => EvictionDecision::Empty,
            // It needs no room in memory, or will not when it is on a disk.
            EvictionQueue::Unlisted if !entry.has_memory() || entry.work().is_some() => {
                EvictionDecision::Empty
            }
            EvictionQueue::Unlisted | EvictionQueue::Writing => {
                EvictionDecision::DeferUntil(self.master.retry_at(now_ms))
            }
            _ if entry.is_leased(now_ms) => EvictionDecision::DeferUntil(entry.stamp),
            // Its client may come back; until then its space helps nobody.
            _ if !self.is_readable(entry) => EvictionDecision::Unresponsive,
            EvictionQueue::SoftPinned
                if pass == EvictionPass::Unpinned
                    && entry.target_queue(now_ms) == EvictionQueue::SoftPinned =>
            {
                EvictionDecision::SoftPinned
            }
            _ => EvictionDecision::Evict,
        }
    }

    /// Evicts an object. With a copy on a disk it only leaves memory; if disks are for what is evicted, it is put on one
    /// first. `bytes` is what the round is to free.
    fn evict_entry(
        &mut self,
        at: u32,
        now_ms: u64,
        bytes: u64,
        sum: &mut EvictionResult,
        fx: &mut dyn StateChangeSink,
    ) {
        let entry = &self.entries[at];
        if entry.copy().is_some() {
            sum.bytes += self.drop_memory_replicas(at, fx);
            sum.keys += 1;
            return;
        }
        let Some(tier) = self.master.settings.disks.filter(|it| it.on_evict) else {
            return self.evict_permanently(at, sum, fx);
        };
        if tier.force_evict && sum.offloaded as f64 >= tier.queue_limit as f64 * tier.cap_ratio {
            return self.evict_permanently(at, sum, fx);
        }
        // Enough is on its way to disks already, and will have left memory soon.
        let is_enough =
            self.master.disk_task_totals.offloading.load(Relaxed) >= bytes.max(self.master.round_bytes());
        let source = if is_enough { None } else { self.offload(at, now_ms).ok() };
        match source {
            Some(source) => {
                sum.offloaded += 1;
                sum.bytes += self.retain_replica(at, source, fx);
            }
            None if tier.force_evict && !is_enough => self.evict_permanently(at, sum, fx),
            None => {
                sum.deferred += 1;
                self.postpone(at, now_ms.saturating_add(DEFER_MS));
            }
        }
    }

    fn evict_permanently(&mut self, at: u32, sum: &mut EvictionResult, fx: &mut dyn StateChangeSink) {
        sum.bytes += self.remove_and_free(at, RemoveCause::Evicted, fx);
        sum.keys += 1;
    }

    fn decide_member(
        &self,
        member: GroupMember,
        group: u32,
        pass: EvictionPass,
        now_ms: u64,
    ) -> EvictionDecision {
        if self.is_member(member, group) {
            self.decide_single(member.index, pass, now_ms)
        } else {
            EvictionDecision::Empty
        }
    }

    pub(crate) fn is_member(&self, member: GroupMember, group: u32) -> bool {
        member.index < self.entries.high_water_mark() && {
            let entry = &self.entries[member.index];
            entry.queue() != EvictionQueue::Vacant && entry.group == group
        }
    }

    fn postpone(&mut self, at: u32, until_ms: u64) {
        self.entries[at].stamp = until_ms;
        let queue = if self.entries[at].queue() == EvictionQueue::SoftPinned {
            EvictionQueue::SoftPinned
        } else {
            EvictionQueue::Leased
        };
        self.enqueue(at, queue);
    }
}
