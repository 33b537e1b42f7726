//! Making room: what was read longest ago goes first, groups as a whole, and soft-pinned objects last.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::allocator::rounded;
use crate::count::Counters;
use crate::fact::{Effects, RemoveCause};
use crate::group::Member;
use crate::locked::Locked;
use crate::master::Master;
use crate::object::Queue;
use crate::recent_writes::Protected;
use crate::slab::NIL;

/// Entries of a shard that are looked at when a tenant needs room.
const TENANT_SEARCH: usize = 4096;

/// Objects that one round passes over because they have to wait for a disk.
const MAX_WAITING: u64 = 1024;
/// For how long such an object is not looked at again, in milliseconds.
const WAITING_MS: u64 = 200;

/// What was evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Evicted {
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
    /// Objects that are on their way to a disk instead.
    pub(crate) offloaded: u64,
    /// Objects that should have gone, but have to wait until others are on a disk.
    pub(crate) waiting: u64,
}

impl Evicted {
    /// Whether anything can be expected of going on.
    fn goes_on(self) -> bool {
        self.waiting < MAX_WAITING
    }
}

/// Which objects may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Unpinned,
    SoftPinned,
}

/// What is to be done with the first of a list.
enum Verdict {
    /// It goes alone.
    Goes,
    /// It goes if these others may go too.
    GoesWith(u32, Vec<Member>),
    /// It stays, and must not be looked at before this time.
    StaysUntil(u64),
    /// It stays as long as something is pinned softly.
    IsPinned,
    /// It stays until one of its nodes is heard of again.
    IsSilent,
    /// There is nothing to evict here.
    Nothing,
}

impl Master {
    /// Evicts until so many bytes may have become free somewhere. False if nothing could be evicted, or if no segment
    /// is large enough anyway.
    pub(crate) fn make_room(&self, now_ms: u64, size: u64, fx: &mut dyn Effects) -> bool {
        let Some(size) = rounded(size) else { return false };
        if !self.segments.load().iter().any(|(_, it)| it.is_writable() && it.info.size >= size) {
            return false;
        }
        let evicted = self.evict(now_ms, size, fx);
        evicted.bytes > 0
    }

    /// Evicts until so many bytes are free, first what is not pinned.
    fn evict(&self, now_ms: u64, bytes: u64, fx: &mut dyn Effects) -> Evicted {
        Counters::add(&self.counters.attempted_evictions, 1);
        let mut sum = Evicted::default();
        let passes = [Pass::Unpinned, Pass::SoftPinned];
        let passes = if self.settings.evict_soft_pinned { &passes[..] } else { &passes[..1] };
        for pass in passes {
            while sum.bytes < bytes && sum.goes_on() {
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
    pub(crate) fn evict_above_watermark(&self, now_ms: u64, fx: &mut dyn Effects) -> Evicted {
        let settings = &self.settings;
        let (used, capacity) = self.segments.load().fill();
        // What is on its way to a disk will go, too.
        let leaving = if self.offloads_evicted() { self.on_disks.offloading.load(Relaxed) } else { 0 };
        let used = used.saturating_sub(leaving);
        let over = used as f64 / capacity.max(1) as f64 - settings.high_watermark;
        if over <= 0.0 {
            return Evicted::default();
        }
        Counters::add(&self.counters.attempted_evictions, 1);
        let share = settings.eviction_ratio.max(over + settings.eviction_ratio).min(1.0);
        let objects = self.key_count() as f64;
        let (target, least) = ((share * objects).ceil(), ((share / 2.0).max(over) * objects).ceil());
        let bytes = (over * capacity as f64) as u64;
        let mut sum = Evicted::default();
        self.evict_pass(now_ms, Pass::Unpinned, (target as u64, bytes), &mut sum, fx);
        if settings.evict_soft_pinned {
            self.evict_pass(now_ms, Pass::SoftPinned, (least as u64, bytes), &mut sum, fx);
        }
        self.count_evicted(sum);
        sum
    }

    fn evict_pass(
        &self,
        now_ms: u64,
        pass: Pass,
        (keys, bytes): (u64, u64),
        sum: &mut Evicted,
        fx: &mut dyn Effects,
    ) {
        while sum.keys + sum.offloaded < keys && sum.goes_on() {
            if !self.evict_oldest(now_ms, pass, bytes, sum, fx) {
                break;
            }
        }
    }

    fn count_evicted(&self, sum: Evicted) {
        Counters::add(&self.counters.evicted_keys, sum.keys);
        Counters::add(&self.counters.evicted_bytes, sum.bytes);
        Counters::add(&self.counters.eviction_rounds, u64::from(sum.keys > 0));
    }

    /// Whether objects go to disks when they would be evicted.
    fn offloads_evicted(&self) -> bool {
        self.settings.disks.is_some_and(|it| it.on_evict)
    }

    /// Evicts what was read longest ago, with its group. `bytes` is what the round is to free. False if nothing may go.
    fn evict_oldest(
        &self,
        now_ms: u64,
        pass: Pass,
        bytes: u64,
        sum: &mut Evicted,
        fx: &mut dyn Effects,
    ) -> bool {
        let protected = self.recent_writes.protected(now_ms, self.settings.lease_ttl_ms);
        loop {
            let first = match pass {
                Pass::Unpinned => {
                    let unread = oldest(&self.oldest_unread).filter(|(_, stamp)| !protected.has(*stamp));
                    let leased = oldest(&self.oldest_leased);
                    unread.into_iter().chain(leased).min_by_key(|(_, stamp)| *stamp)
                }
                Pass::SoftPinned => oldest(&self.oldest_soft),
            };
            let Some((shard, _)) = first.filter(|(_, stamp)| *stamp <= now_ms) else {
                return false;
            };
            let mut shard = self.lock(shard);
            let Some((at, verdict)) = shard.judge_first(pass, protected, now_ms) else { continue };
            match verdict {
                Verdict::Nothing => {}
                Verdict::Goes => {
                    shard.evict_entry(at, now_ms, bytes, sum, fx);
                    return true;
                }
                Verdict::StaysUntil(until_ms) => shard.postpone(at, until_ms),
                Verdict::IsPinned => shard.enqueue(at, Queue::Soft),
                Verdict::IsSilent => shard.enqueue(at, Queue::Apart),
                Verdict::GoesWith(group, members) => {
                    let first = Member { shard: shard.at as u32, place: at };
                    drop(shard);
                    let before = (sum.keys, sum.offloaded, sum.waiting);
                    self.evict_group(first, group, &members, (now_ms, pass, bytes), sum, fx);
                    if before != (sum.keys, sum.offloaded, sum.waiting) {
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
        first: Member,
        group: u32,
        members: &[Member],
        (now_ms, pass, bytes): (u64, Pass, u64),
        sum: &mut Evicted,
        fx: &mut dyn Effects,
    ) {
        let verdicts = members.iter().map(|it| self.lock(it.shard as usize).judge(*it, group, pass, now_ms));
        let mut stays = None;
        for verdict in verdicts {
            match verdict {
                Verdict::StaysUntil(until) => stays = Some(stays.map_or(until, |it: u64| it.max(until))),
                Verdict::IsPinned => stays = stays.or(Some(0)),
                Verdict::IsSilent => stays = Some(stays.unwrap_or(0).max(self.retry_at(now_ms))),
                Verdict::Goes | Verdict::GoesWith(..) | Verdict::Nothing => {}
            }
        }
        if let Some(until_ms) = stays {
            let mut shard = self.lock(first.shard as usize);
            if shard.is_member(first, group) && !shard.entries[first.place].is_leased(now_ms) {
                match until_ms {
                    0 => shard.enqueue(first.place, Queue::Soft),
                    _ => shard.postpone(first.place, until_ms),
                }
            }
            return;
        }
        for member in members {
            let mut shard = self.lock(member.shard as usize);
            // Somebody may have read it in between.
            if matches!(shard.judge(*member, group, pass, now_ms), Verdict::Goes) {
                shard.evict_entry(member.place, now_ms, bytes, sum, fx);
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
    pub(crate) fn make_room_for_tenant(
        &self,
        now_ms: u64,
        tenant: u16,
        bytes: u64,
        fx: &mut dyn Effects,
    ) -> bool {
        Counters::add(&self.counters.attempted_evictions, 1);
        let mut sum = Evicted::default();
        for shard in 0..self.shards.len() {
            let mut shard = self.lock(shard);
            for queue in [Queue::Unread, Queue::Leased, Queue::Soft] {
                if queue == Queue::Soft && !self.settings.evict_soft_pinned {
                    continue;
                }
                let mut next = shard.head(queue);
                for _ in 0..TENANT_SEARCH {
                    let Some(at) = next else { break };
                    next = shard.after(at);
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
    pub(crate) fn unpin(&self, now_ms: u64, shard: usize) {
        let mut shard = self.lock(shard);
        let mut next = shard.head(Queue::Soft);
        while let Some(at) = next {
            next = shard.after(at);
            let queue = shard.entries[at].fitting_queue(now_ms);
            if queue != Queue::Soft {
                shard.enqueue(at, queue);
            }
        }
    }
}

fn oldest(stamps: &[AtomicU64]) -> Option<(usize, u64)> {
    stamps.iter().map(|stamp| stamp.load(Relaxed)).enumerate().min_by_key(|(_, stamp)| *stamp)
}

impl Locked<'_> {
    /// Puts back into their lists what was set apart while a segment was silent.
    pub(crate) fn reconsider(&mut self, segment: u16, now_ms: u64) {
        let (places, _) = self.occupied(0, NIL);
        let is_apart = |at: &u32| {
            let entry = &self.entries[*at];
            entry.queue() == Queue::Apart && entry.replicas().any(|it| it.segment == segment)
        };
        let apart: Vec<u32> = places.filter(is_apart).collect();
        for at in apart {
            let queue = self.entries[at].fitting_queue(now_ms);
            self.enqueue(at, queue);
        }
    }

    /// The entry of this shard that is first to go, and what is to be done with it.
    fn judge_first(&self, pass: Pass, protected: Protected, now_ms: u64) -> Option<(u32, Verdict)> {
        let queues =
            if pass == Pass::Unpinned { &[Queue::Unread, Queue::Leased][..] } else { &[Queue::Soft] };
        let heads = queues.iter().filter_map(|queue| self.head(*queue)).filter(|at| {
            let entry = &self.entries[*at];
            entry.queue() != Queue::Unread || !protected.has(entry.stamp)
        });
        let at = heads.min_by_key(|at| self.entries[*at].stamp)?;
        let entry = &self.entries[at];
        if entry.stamp > now_ms {
            return Some((at, Verdict::Nothing));
        }
        if entry.group != NIL {
            let members = self.master.groups.members(entry.group);
            if members.len() > 1 {
                return Some((at, Verdict::GoesWith(entry.group, members)));
            }
        }
        Some((at, self.judge_alone(at, pass, now_ms)))
    }

    fn judge_alone(&self, at: u32, pass: Pass, now_ms: u64) -> Verdict {
        let entry = &self.entries[at];
        match entry.queue() {
            Queue::Vacant => Verdict::Nothing,
            // It needs no room in memory, or will not when it is on a disk.
            Queue::Apart if !entry.has_memory() || entry.work().is_some() => Verdict::Nothing,
            Queue::Apart | Queue::Writing => Verdict::StaysUntil(self.master.retry_at(now_ms)),
            _ if entry.is_leased(now_ms) => Verdict::StaysUntil(entry.stamp),
            // Its client may come back; until then its space helps nobody.
            _ if !self.is_readable(entry) => Verdict::IsSilent,
            Queue::Soft if pass == Pass::Unpinned && entry.fitting_queue(now_ms) == Queue::Soft => {
                Verdict::IsPinned
            }
            _ => Verdict::Goes,
        }
    }

    /// Evicts an object. With a copy on a disk it only leaves memory; if disks are for what is evicted, it is put on one
    /// first. `bytes` is what the round is to free.
    fn evict_entry(&mut self, at: u32, now_ms: u64, bytes: u64, sum: &mut Evicted, fx: &mut dyn Effects) {
        let entry = &self.entries[at];
        if entry.copy().is_some() {
            sum.bytes += self.leave_memory(at, fx);
            sum.keys += 1;
            return;
        }
        let Some(tier) = self.master.settings.disks.filter(|it| it.on_evict) else {
            return self.evict_for_good(at, sum, fx);
        };
        if tier.force_evict && sum.offloaded as f64 >= tier.queue_limit as f64 * tier.cap_ratio {
            return self.evict_for_good(at, sum, fx);
        }
        // Enough is on its way to disks already, and will have left memory soon.
        let is_enough = self.master.on_disks.offloading.load(Relaxed) >= bytes.max(self.master.round_bytes());
        let source = if is_enough { None } else { self.offload(at, now_ms).ok() };
        match source {
            Some(source) => {
                sum.offloaded += 1;
                sum.bytes += self.keep_only(at, source, fx);
            }
            None if tier.force_evict && !is_enough => self.evict_for_good(at, sum, fx),
            None => {
                sum.waiting += 1;
                self.postpone(at, now_ms.saturating_add(WAITING_MS));
            }
        }
    }

    fn evict_for_good(&mut self, at: u32, sum: &mut Evicted, fx: &mut dyn Effects) {
        sum.bytes += self.drop_object(at, RemoveCause::Evicted, fx);
        sum.keys += 1;
    }

    fn judge(&self, member: Member, group: u32, pass: Pass, now_ms: u64) -> Verdict {
        if self.is_member(member, group) {
            self.judge_alone(member.place, pass, now_ms)
        } else {
            Verdict::Nothing
        }
    }

    pub(crate) fn is_member(&self, member: Member, group: u32) -> bool {
        member.place < self.entries.bound() && {
            let entry = &self.entries[member.place];
            entry.queue() != Queue::Vacant && entry.group == group
        }
    }

    fn postpone(&mut self, at: u32, until_ms: u64) {
        self.entries[at].stamp = until_ms;
        let queue = if self.entries[at].queue() == Queue::Soft { Queue::Soft } else { Queue::Leased };
        self.enqueue(at, queue);
    }
}
