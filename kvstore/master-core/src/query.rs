//! What can be asked about the whole.

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{SegmentDetail, SegmentsDetail, TenantQuota};
use mooncake_wire::types::Uuid;

use crate::change::{StateChange, StateChangeSink};
use crate::master::MasterCore;
use crate::statistics::MasterStatistics;

/// Bytes in a gibibyte.
const GIB: f64 = (1_u64 << 30) as f64;

/// Where a walk over all objects goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObjectCursor {
    pub(crate) shard: usize,
    pub(crate) index: u32,
}

/// Bytes in use and in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceUsage {
    /// Bytes in use, as they were asked for; with what is lost by rounding, objects take up a little more.
    pub used: u64,
    /// Bytes in all.
    pub capacity: u64,
    /// The largest object that fits without evicting anything, in bytes.
    pub largest_free: u64,
}

/// What is known about all keys with a common beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixStatistics {
    /// The beginning up to the first separator; empty for keys without one, nothing for those that are not told apart.
    pub prefix: Option<Box<str>>,
    /// Objects.
    pub keys: u64,
    /// Bytes of the objects, each counted once.
    pub bytes: u64,
    /// Reads since the master was made.
    pub hits: u64,
}

impl MasterCore {
    /// Hands over keys, whose tenant comes first, of a part of the table; returns where to go on, nothing at the end.
    /// Only objects that have been written. At most `limit` places are looked at under one lock.
    pub fn keys(
        &self,
        from: ObjectCursor,
        limit: u32,
        mut each: impl FnMut(&str, &str),
    ) -> Option<ObjectCursor> {
        self.scan(from, limit, |shard, at| {
            let entry = &shard.entries[at];
            if entry.is_complete() {
                let tenant = self.tenants.get(entry.tenant);
                each(tenant.as_ref().map_or("", |it| &*it.name), &entry.key);
            }
        })
    }

    pub(crate) fn scan(
        &self,
        from: ObjectCursor,
        limit: u32,
        mut each: impl FnMut(&crate::locked_shard::LockedShard<'_>, u32),
    ) -> Option<ObjectCursor> {
        if from.shard >= self.shards.len() {
            return None;
        }
        let shard = self.lock(from.shard);
        let (places, next) = shard.occupied(from.index, limit.max(1));
        places.for_each(|at| each(&shard, at));
        match next {
            Some(place) => Some(ObjectCursor { shard: from.shard, index: place }),
            None if from.shard + 1 < self.shards.len() => {
                Some(ObjectCursor { shard: from.shard + 1, index: 0 })
            }
            None => None,
        }
    }

    /// Objects, including those that are being written.
    pub fn key_count(&self) -> u64 {
        self.shards.iter().map(|shard| shard.lock().entries.len() as u64).sum()
    }

    /// Objects that are pinned softly.
    pub fn soft_pinned_count(&self) -> u64 {
        self.shards.iter().map(|shard| shard.lock().soft_pinned as u64).sum()
    }

    /// How full everything is.
    pub fn space_usage(&self) -> SpaceUsage {
        let segments = self.segments.load();
        let used = segments.iter().fold(0_u64, |sum, (_, it)| sum.saturating_add(it.requested()));
        let capacity = segments.usage().1;
        let largest = |it: &crate::segment::SegmentEntry| it.with_allocator(|space| space.largest_free());
        let writable = segments.iter().filter(|(_, it)| it.is_writable());
        SpaceUsage { used, capacity, largest_free: writable.map(|(_, it)| largest(it)).max().unwrap_or(0) }
    }

    /// How full a segment is, by its name.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_usage(&self, name: &str) -> Result<SpaceUsage, ErrorCode> {
        let segments = self.segments.load();
        let places = segments.indices_by_name(name);
        if places.is_empty() {
            return Err(ErrorCode::SEGMENT_NOT_FOUND);
        }
        let mut sum = SpaceUsage::default();
        for mounted in places.iter().filter_map(|at| segments.get(*at)) {
            sum.used += mounted.requested();
            sum.capacity += mounted.descriptor.size;
            sum.largest_free = sum.largest_free.max(mounted.with_allocator(|space| space.largest_free()));
        }
        Ok(sum)
    }

    /// All segments, in the order of their places.
    pub fn segments_detail(&self) -> SegmentsDetail {
        let segments = self.segments.load();
        let detail = |it: &crate::segment::SegmentEntry| SegmentDetail {
            segment_name: it.descriptor.name.to_string(),
            segment_id: it.descriptor.id,
            client_id: it.client,
            base_address: format!("{:#x}", it.descriptor.base),
            size_bytes: it.descriptor.size,
            size_human: format!("{} GiB", it.descriptor.size as f64 / GIB),
            te_endpoint: it.descriptor.te_endpoint.to_string(),
            protocol: it.descriptor.protocol.to_string(),
            status: it.status().name().unwrap_or_default().to_owned(),
            allocator_used_bytes: it.requested(),
            allocator_capacity_bytes: it.descriptor.size,
            allocator_usage_percent: 100.0 * it.requested() as f64 / it.descriptor.size.max(1) as f64,
        };
        let segments: Vec<SegmentDetail> = segments.iter().map(|(_, it)| detail(it)).collect();
        SegmentsDetail { total_segments: segments.len() as u64, segments }
    }

    /// Whether a segment's client is not heard of.
    pub fn is_silent(&self, segment: Uuid) -> bool {
        let segments = self.segments.load();
        segments.index_of(segment).and_then(|at| segments.get(at)).is_some_and(|it| !it.is_readable())
    }

    /// What the master has done.
    pub fn statistics(&self) -> MasterStatistics {
        let mut counts = self.counters.read();
        for shard in &self.shards {
            let shard = shard.lock();
            counts.read_bytes = counts.read_bytes.saturating_add(shard.read_bytes);
            counts.disk_reads = counts.disk_reads.saturating_add(shard.disk_reads.0);
            counts.disk_read_bytes = counts.disk_read_bytes.saturating_add(shard.disk_reads.1);
        }
        counts
    }

    /// Keys by their beginnings.
    pub fn prefix_statistics(&self) -> Vec<PrefixStatistics> {
        let mut sums = vec![PrefixStatistics::default(); usize::from(u8::MAX) + 1];
        for shard in &self.shards {
            for (sum, tally) in sums.iter_mut().zip(&shard.lock().prefix_tallies) {
                sum.keys += tally.keys;
                sum.bytes += tally.bytes;
                sum.hits += tally.hits;
            }
        }
        for (at, sum) in (0..=u8::MAX).zip(&mut sums) {
            sum.prefix = self.prefixes.name(at).map(|name| (*name).into());
        }
        sums.retain(|it| it.keys > 0 || it.hits > 0);
        sums
    }

    /// Sets how many bytes a tenant may use.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without tenants, `INVALID_PARAMS` for a quota that is not in 1 to 2^63 - 1.
    pub fn set_quota(
        &self,
        tenant: &str,
        requested: u64,
        fx: &mut dyn StateChangeSink,
    ) -> Result<TenantQuota, ErrorCode> {
        self.check_multi_tenant()?;
        let quota = self.tenants.set_quota(tenant, requested, self.capacity())?;
        fx.record(StateChange::TenantQuota { tenant: tenant.into(), requested: Some(requested) });
        Ok(quota)
    }

    /// Takes a tenant's quota away: it can write nothing any more.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without tenants, `OBJECT_NOT_FOUND` without a quota, `TENANT_NOT_EMPTY` while it
    /// has objects.
    pub fn remove_quota(&self, tenant: &str, fx: &mut dyn StateChangeSink) -> Result<(), ErrorCode> {
        self.check_multi_tenant()?;
        self.tenants.remove_quota(tenant, self.capacity())?;
        fx.record(StateChange::TenantQuota { tenant: tenant.into(), requested: None });
        Ok(())
    }

    /// A tenant's quota.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without tenants, `OBJECT_NOT_FOUND` without a quota.
    pub fn quota(&self, tenant: &str) -> Result<TenantQuota, ErrorCode> {
        self.check_multi_tenant()?;
        self.tenants.quota(tenant).ok_or(ErrorCode::OBJECT_NOT_FOUND)
    }

    /// All quotas.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without tenants.
    pub fn quotas(&self) -> Result<Vec<TenantQuota>, ErrorCode> {
        self.check_multi_tenant()?;
        Ok(self.tenants.quotas())
    }

    fn check_multi_tenant(&self) -> Result<(), ErrorCode> {
        if self.tenants.enabled() { Ok(()) } else { Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE) }
    }
}
