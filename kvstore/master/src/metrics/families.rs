//! Mooncake's metric families of the state.

use mooncake_wire::admin::TenantQuota;
use mooncake_wire::rpc::RpcMethod;

use super::text::MasterMetricsText;
use crate::observer::{SIZE_BOUNDS, ValueSizeHistogram};
use crate::server::MasterServer;

/// Families of objects, segments and clients.
pub(super) fn state(text: &mut MasterMetricsText, server: &MasterServer) {
    let master = &server.master;
    let space = master.space_usage();
    text.gauge("master_allocated_bytes", "Bytes of memory in use.", space.used);
    text.gauge("master_total_capacity_bytes", "Bytes of memory in all segments.", space.capacity);
    let segments = master.segments_detail().segments;
    let mut used = text.gauges("segment_allocated_bytes", "Bytes of memory in use, by segment.");
    for segment in &segments {
        used.value(&[("segment", &segment.segment_name)], segment.allocator_used_bytes);
    }
    let mut sizes = text.gauges("segment_total_capacity_bytes", "Bytes of memory, by segment.");
    for segment in &segments {
        sizes.value(&[("segment", &segment.segment_name)], segment.size_bytes);
    }
    for (name, help) in [
        ("master_nof_allocated_bytes", "Bytes in use on disks behind NVMe over fabrics."),
        ("master_total_nof_capacity_bytes", "Bytes of disks behind NVMe over fabrics."),
    ] {
        text.gauge(name, help, 0);
    }
    let disks = master.disk_usage();
    text.gauge("master_allocated_file_size_bytes", "Bytes of objects on nodes' disks.", disks.used);
    text.gauge("master_total_file_capacity_bytes", "Bytes of nodes' disks.", disks.capacity);
    text.gauge("master_key_count", "Objects, including those being written.", master.key_count());
    let soft = master.soft_pinned_count();
    text.gauge("master_soft_pin_key_count", "Soft-pinned objects.", soft);
    text.gauge("master_active_clients", "Clients with a recent heartbeat.", master.client_counts().0);
}

/// Histogram of the sizes of written objects.
pub(super) fn value_sizes(text: &mut MasterMetricsText, sizes: &ValueSizeHistogram) {
    let (buckets, sum) = sizes.read();
    let bounds = SIZE_BOUNDS.iter().map(|bound| format!("{bound}.000000")).chain(["+Inf".to_owned()]);
    text.histograms("master_value_size_bytes", "Sizes of written objects in bytes.").histogram(
        &[],
        bounds.zip(buckets),
        sum,
    );
}

/// Families of read hits and misses.
pub(super) fn reads(text: &mut MasterMetricsText, server: &MasterServer) {
    let single = server.counters.call_counts(RpcMethod::GetReplicaList);
    let batch = server.counters.call_counts(RpcMethod::BatchGetReplicaList);
    let total = single.requests + batch.items;
    let found = total.saturating_sub(single.failures + batch.failed_items);
    let counts = server.master.statistics();
    let in_memory = found.saturating_sub(counts.disk_reads);
    text.counter("mem_cache_hit_nums_", "Object reads served from memory.", in_memory);
    let bytes = counts.read_bytes;
    text.counter("mem_cache_hit_bytes_total", "Bytes of object reads served from memory.", bytes);
    text.counter("file_cache_hit_nums_", "Object reads served from a disk.", counts.disk_reads);
    let bytes = counts.disk_read_bytes;
    text.counter("file_cache_hit_bytes_total", "Bytes of object reads served from a disk.", bytes);
    text.gauge("mem_cache_nums_", "Objects, including those only on disks.", server.master.key_count());
    text.gauge("file_cache_nums_", "Objects on disks.", server.master.disk_usage().copies);
    text.counter("valid_get_nums_", "Object reads that found the object.", found);
    text.counter("total_get_nums_", "Object reads.", total);
}

/// Families of evictions and of unfinished puts. Only memory is evicted.
pub(super) fn evictions(text: &mut MasterMetricsText, server: &MasterServer) {
    let counts = server.master.statistics();
    text.counter(
        "master_put_start_alloc_failures_total",
        "Puts rejected for lack of space.",
        counts.allocation_failures,
    );
    text.counter(
        "master_put_start_partial_allocations_total",
        "Puts that got fewer replicas than requested.",
        counts.partial_allocations,
    );
    for (suffix, round) in [("_total", ""), ("_mem", "_mem")] {
        let successful = format!("master_successful_evictions{suffix}");
        text.counter(&successful, "Eviction rounds that freed space.", counts.eviction_rounds);
        let attempted = format!("master_attempted_evictions{suffix}");
        text.counter(
            &attempted,
            "Eviction rounds, including those that found nothing to evict.",
            counts.attempted_evictions,
        );
        let keys = format!("master_evicted_key_count{round}");
        text.counter(&keys, "Evicted objects.", counts.evicted_keys);
        let bytes = format!("master_evicted_size_bytes{round}");
        text.counter(&bytes, "Bytes of evicted objects.", counts.evicted_bytes);
    }
    text.counter(
        "master_put_start_discard_cnt",
        "Puts discarded because they were not finished in time.",
        counts.discarded_puts,
    );
    text.counter(
        "master_put_start_release_cnt",
        "Discarded puts whose space was released.",
        counts.discarded_puts,
    );
}

/// Families of tenants, if multi-tenancy is enabled.
pub(super) fn tenants(text: &mut MasterMetricsText, server: &MasterServer) {
    let master = &server.master;
    let Ok(quotas) = master.quotas() else { return };
    type QuotaValue = fn(&TenantQuota) -> u64;
    let gauges: [(&str, &str, QuotaValue); 6] = [
        ("requested_bytes", "Requested quota in bytes.", |quota| quota.requested_quota_bytes),
        ("effective_bytes", "Effective quota in bytes.", |quota| quota.effective_quota_bytes),
        ("charged_bytes", "Bytes in use by the tenant.", |quota| quota.charged_bytes),
        ("admission_closed", "1 if new objects of the tenant are rejected.", |quota| {
            quota.admission_closed.into()
        }),
        ("over_quota", "1 if the tenant uses more than its quota.", |quota| quota.over_quota.into()),
        ("explicit_policy", "1 if the quota was set explicitly.", |quota| quota.has_explicit_policy.into()),
    ];
    for (name, help, value_of) in gauges {
        let name = format!("mooncake_tenant_quota_{name}");
        let mut family = text.gauges(&name, help);
        quotas.iter().for_each(|quota| family.value(&[("tenant_id", &quota.tenant_id)], value_of(quota)));
    }
    let capacity = master.space_usage().capacity;
    text.gauge(
        "mooncake_tenant_quota_allocatable_capacity_bytes",
        "Memory available to all tenants in bytes.",
        capacity,
    );
    for (name, help, value_of) in gauges.into_iter().take(2) {
        let name = format!("mooncake_tenant_quota_{name}_sum");
        let sum: u128 = quotas.iter().map(|quota| u128::from(value_of(quota))).sum();
        text.gauge(&name, help, sum);
    }
}

/// Families of promotions from disk to memory.
pub(super) fn promotions(text: &mut MasterMetricsText, server: &MasterServer) {
    let (master, counts) = (&server.master, server.master.statistics());
    let promoting = master.disk_usage().promoting;
    text.gauge("master_promotion_in_flight", "Promotions in flight from disk to memory.", promoting);
    let finished = counts.promoted_keys + counts.promotions_failed + counts.promotions_expired;
    let cancelled = counts.promotions.saturating_sub(finished + promoting);
    for (suffix, help, value) in [
        ("admitted_total", "Promotions started.", counts.promotions),
        ("completed_total", "Promotions completed.", counts.promoted_keys),
        ("completed_bytes_total", "Bytes of completed promotions.", counts.promoted_bytes),
        ("expired_total", "Promotions that timed out.", counts.promotions_expired),
        ("failed_total", "Promotions that failed.", counts.promotions_failed),
        ("cancelled_total", "Promotions cancelled because the object was removed.", cancelled),
        (
            "rejected_frequency_total",
            "Promotions rejected because the object is read too rarely.",
            counts.promotions_rejected_frequency,
        ),
        (
            "rejected_watermark_total",
            "Promotions rejected because memory is nearly full.",
            counts.promotions_rejected_watermark,
        ),
        (
            "rejected_cap_total",
            "Promotions rejected because too many are in flight.",
            counts.promotions_rejected_cap,
        ),
    ] {
        text.counter(&format!("master_promotion_{suffix}"), help, value);
    }
}

/// Families of features that this master does not have or does not count.
pub(super) fn unused(text: &mut MasterMetricsText) {
    text.gauge("master_put_start_discarded_staging_size", "Not counted by this master.", 0);
    for suffix in [
        "candidate_recorded_total",
        "candidate_admitted_total",
        "candidate_admission_rejected_total",
        "candidate_expired_evaluated_total",
        "candidate_expired_unevaluated_total",
        "candidate_dropped_limit_total",
    ] {
        text.counter(
            &format!("master_promotion_{suffix}"),
            "Not implemented: rejected promotions are retried on the next read.",
            0,
        );
    }
    for suffix in [
        "oplog_last_sequence_id",
        "oplog_applied_sequence_id",
        "oplog_standby_lag",
        "oplog_pending_entries",
        "pending_mutation_queue_size",
        "standby_state",
    ] {
        text.gauge(
            &format!("ha_{suffix}"),
            "Not implemented: Moongate's master has no such replication queue.",
            0,
        );
    }
}
