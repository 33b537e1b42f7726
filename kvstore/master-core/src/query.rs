//! Queries about the whole state.

use std::collections::BTreeMap;

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{SegmentDetail, SegmentsDetail, TenantQuota};
use mooncake_wire::object_locations::ObjectLocation;
use mooncake_wire::types::{SegmentStatus, Uuid};
use moongate_retention::TrialHits;

use crate::change::{StateChange, StateChangeSink};
use crate::indices::PrefixIndex;
use crate::locked_shard::ObjectCursor;
use crate::master::MasterCore;
use crate::statistics::MasterStatistics;

const GIB: f64 = (1_u64 << 30) as f64;

/// Used, total and largest free space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceUsage {
    /// Number of allocated bytes, before rounding up.
    pub used: u64,
    pub capacity: u64,
    /// Size of the largest object that fits without eviction, in bytes.
    pub largest_free: u64,
}

/// Statistics of all keys with a common prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixStatistics {
    /// Prefix up to the first separator; empty for keys without one, `None` for all prefixes above the limit.
    pub prefix: Option<Box<str>>,
    pub keys: u64,
    /// Bytes of the objects, each counted once.
    pub bytes: u64,
    /// Reads since the master was created.
    pub hits: u64,
}

impl MasterCore {
    /// Calls `each` with tenant and key of completely written objects. Scans at most `limit` entries under one lock, and returns the
    /// cursor for the next call, `None` at the end.
    pub fn keys(
        &self,
        from: ObjectCursor,
        limit: u32,
        mut each: impl FnMut(&str, &str),
    ) -> Option<ObjectCursor> {
        self.objects.scan(from, limit, |shard, index| {
            let entry = &shard.entries[index];
            if entry.is_complete() {
                let tenant = self.objects.tenants.get(entry.tenant);
                each(tenant.as_ref().map_or("", |tenant| &*tenant.name), shard.key(index));
            }
        })
    }

    /// Calls `each` with key and locations, those in memory first, of each object of a tenant that [`Self::peek`] would find. Scans at
    /// most `limit` entries under one lock, and returns the cursor for the next call, `None` at the end.
    pub fn readable_objects(
        &self,
        tenant: &str,
        from: ObjectCursor,
        limit: u32,
        mut each: impl FnMut(&str, &mut dyn Iterator<Item = ObjectLocation<'_>>),
    ) -> Option<ObjectCursor> {
        let tenant = self.objects.tenants.index_of(tenant)?;
        self.objects.scan(from, limit, |shard, index| {
            let entry = &shard.entries[index];
            if entry.tenant != tenant || !entry.is_complete() {
                return;
            }
            let in_memory = shard.replicas_for_readers(entry).filter_map(|replica| {
                let segment = shard.segments.get(replica.segment)?;
                Some(ObjectLocation { endpoint: &segment.descriptor.te_endpoint, is_on_disk: false })
            });
            let copy = entry.copy().filter(|copy| copy.disk.is_responsive());
            let on_disk = copy.map(|copy| ObjectLocation { endpoint: &copy.endpoint, is_on_disk: true });
            let mut locations = in_memory.chain(on_disk).peekable();
            if locations.peek().is_some() {
                each(shard.key(index), &mut locations);
            }
        })
    }

    /// Number of objects, including those being written.
    pub fn key_count(&self) -> u64 {
        self.objects.key_count()
    }

    pub fn soft_pinned_count(&self) -> u64 {
        self.objects.shards.iter().map(|shard| shard.lock().soft_pinned as u64).sum()
    }

    /// Space usage of all segments.
    pub fn space_usage(&self) -> SpaceUsage {
        let segments = self.objects.segments.load();
        let used = segments.iter().fold(0_u64, |sum, (_, segment)| sum.saturating_add(segment.requested()));
        let capacity = segments.usage().capacity;
        let largest = |segment: &crate::segment::SegmentEntry| {
            segment.with_allocator(|allocator| allocator.largest_free())
        };
        let writable = segments.iter().filter(|(_, segment)| segment.is_writable());
        SpaceUsage {
            used,
            capacity,
            largest_free: writable.map(|(_, segment)| largest(segment)).max().unwrap_or(0),
        }
    }

    /// Space usage of the segments with this name.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_usage(&self, name: &str) -> Result<SpaceUsage, ErrorCode> {
        let segments = self.objects.segments.load();
        let indices = segments.indices_by_name(name);
        if indices.is_empty() {
            return Err(ErrorCode::SEGMENT_NOT_FOUND);
        }
        let mut sum = SpaceUsage::default();
        for mounted in indices.iter().filter_map(|index| segments.get(*index)) {
            sum.used += mounted.requested();
            sum.capacity += mounted.descriptor.size;
            sum.largest_free =
                sum.largest_free.max(mounted.with_allocator(|allocator| allocator.largest_free()));
        }
        Ok(sum)
    }

    /// Details of all segments, by index.
    pub fn segments_detail(&self) -> SegmentsDetail {
        let segments = self.objects.segments.load();
        let detail = |segment: &crate::segment::SegmentEntry| SegmentDetail {
            segment_name: segment.descriptor.name.to_string(),
            segment_id: segment.descriptor.id,
            client_id: segment.client,
            base_address: format!("{:#x}", segment.descriptor.base),
            size_bytes: segment.descriptor.size,
            size_human: format!("{} GiB", segment.descriptor.size as f64 / GIB),
            te_endpoint: segment.descriptor.te_endpoint.to_string(),
            protocol: segment.descriptor.protocol.to_string(),
            status: segment.status().name().unwrap_or_default().to_owned(),
            allocator_used_bytes: segment.requested(),
            allocator_capacity_bytes: segment.descriptor.size,
            allocator_usage_percent: 100.0 * segment.requested() as f64
                / segment.descriptor.size.max(1) as f64,
        };
        let segments: Vec<SegmentDetail> = segments.iter().map(|(_, segment)| detail(segment)).collect();
        SegmentsDetail { total_segments: segments.len() as u64, segments }
    }

    /// Hosts of clients' segments, without ports. Unknown clients are omitted.
    pub fn query_ip(&self, clients: &[Uuid]) -> BTreeMap<Uuid, Vec<String>> {
        let segments = self.objects.segments.load();
        let mut found = BTreeMap::new();
        for client in clients {
            let own = segments.iter().filter(|(_, segment)| segment.client == *client);
            let mut hosts: Vec<String> =
                own.map(|(_, segment)| host(&segment.descriptor.te_endpoint).to_owned()).collect();
            hosts.sort_unstable();
            hosts.dedup();
            if !hosts.is_empty() {
                found.insert(*client, hosts);
            }
        }
        found
    }

    /// Status of the segment with this name.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status(&self, name: &str) -> Result<SegmentStatus, ErrorCode> {
        let segments = self.objects.segments.load();
        let first = segments.indices_by_name(name).first().and_then(|index| segments.get(*index));
        first.map(|segment| segment.status()).ok_or(ErrorCode::SEGMENT_NOT_FOUND)
    }

    /// Status of the segment with this id.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status_by_id(&self, id: Uuid) -> Result<SegmentStatus, ErrorCode> {
        let segments = self.objects.segments.load();
        let segment = segments.index_of(id).and_then(|index| segments.get(index));
        segment.map(|mounted| mounted.status()).ok_or(ErrorCode::SEGMENT_NOT_FOUND)
    }

    /// Whether a segment's client is silent.
    pub fn is_silent(&self, segment: Uuid) -> bool {
        let segments = self.objects.segments.load();
        segments
            .index_of(segment)
            .and_then(|index| segments.get(index))
            .is_some_and(|mounted| !mounted.is_readable())
    }

    /// Totals of the master's operations.
    pub fn statistics(&self) -> MasterStatistics {
        let mut counts = self.objects.counters.read();
        for shard in &self.objects.shards {
            let shard = shard.lock();
            counts.read_bytes = counts.read_bytes.saturating_add(shard.read_bytes);
            counts.disk_reads = counts.disk_reads.saturating_add(shard.disk_reads.reads);
            counts.disk_read_bytes = counts.disk_read_bytes.saturating_add(shard.disk_reads.bytes);
        }
        counts
    }

    /// Recent hits of sampled keys with each retention policy.
    pub fn retention_trial(&self) -> TrialHits {
        self.objects.retention.trial_hits()
    }

    pub fn prefix_statistics(&self) -> Vec<PrefixStatistics> {
        let mut sums = vec![PrefixStatistics::default(); PrefixIndex::all().count()];
        for shard in &self.objects.shards {
            for (sum, tally) in sums.iter_mut().zip(&shard.lock().prefix_tallies) {
                sum.keys += tally.keys;
                sum.bytes += tally.bytes;
                sum.hits += tally.hits;
            }
        }
        for (index, sum) in PrefixIndex::all().zip(&mut sums) {
            sum.prefix = self.objects.prefixes.name(index).map(|name| (*name).into());
        }
        sums.retain(|sum| sum.keys > 0 || sum.hits > 0);
        sums
    }

    /// Sets a tenant's quota in bytes.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy, `INVALID_PARAMS` for a quota that is not in 1 to 2^63 - 1.
    pub fn set_quota(
        &self,
        tenant: &str,
        requested: u64,
        fx: &mut dyn StateChangeSink,
    ) -> Result<TenantQuota, ErrorCode> {
        self.check_multi_tenant()?;
        let quota = self.objects.tenants.set_quota(tenant, requested, self.objects.capacity())?;
        fx.record(StateChange::TenantQuota { tenant: tenant.into(), requested: Some(requested) });
        Ok(quota)
    }

    /// Removes a tenant's quota: its writes are rejected from now on.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy, `OBJECT_NOT_FOUND` without a quota, `TENANT_NOT_EMPTY` while it
    /// has objects.
    pub fn remove_quota(&self, tenant: &str, fx: &mut dyn StateChangeSink) -> Result<(), ErrorCode> {
        self.check_multi_tenant()?;
        self.objects.tenants.remove_quota(tenant, self.objects.capacity())?;
        fx.record(StateChange::TenantQuota { tenant: tenant.into(), requested: None });
        Ok(())
    }

    /// A tenant's quota.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy, `OBJECT_NOT_FOUND` without a quota.
    pub fn quota(&self, tenant: &str) -> Result<TenantQuota, ErrorCode> {
        self.check_multi_tenant()?;
        self.objects.tenants.quota(tenant).ok_or(ErrorCode::OBJECT_NOT_FOUND)
    }

    /// All quotas.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_MODE` without multi-tenancy.
    pub fn quotas(&self) -> Result<Vec<TenantQuota>, ErrorCode> {
        self.check_multi_tenant()?;
        Ok(self.objects.tenants.quotas())
    }

    fn check_multi_tenant(&self) -> Result<(), ErrorCode> {
        if self.objects.tenants.enabled() { Ok(()) } else { Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE) }
    }
}

fn host(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}
