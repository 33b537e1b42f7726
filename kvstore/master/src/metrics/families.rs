//! Mooncake's metric families of the state.

use mooncake_wire::admin::TenantQuota;
use mooncake_wire::rpc::RpcMethod;
use moongate_runtime::metrics::{HistogramSnapshot, MetricsWriter};

use crate::observer::{FactObserver, SIZE_BOUNDS, ValueSizeHistogram};
use crate::server::MasterServer;

pub(super) fn all(writer: &mut MetricsWriter<'_>, server: &MasterServer, observer: &FactObserver) {
    state(writer, server);
    liveness(writer, server, observer);
    value_sizes(writer, &observer.sizes);
    reads(writer, server);
    existing_objects(writer, server);
    evictions(writer, server);
    tenants(writer, server);
    promotions(writer, server);
    unused(writer);
}

/// Families of objects, segments and clients.
fn state(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let master = &server.master;
    let space = master.space_usage();
    writer.gauge("master_allocated_bytes", "Bytes of memory in use", space.used);
    writer.gauge("master_total_capacity_bytes", "Bytes of memory in all segments", space.capacity);
    let segments = master.segments_detail().segments;
    writer.gauge_by(
        "segment_allocated_bytes",
        "Bytes of memory in use, by segment",
        "segment",
        segments.iter().map(|segment| (&segment.segment_name, segment.allocator_used_bytes)),
    );
    writer.gauge_by(
        "segment_total_capacity_bytes",
        "Bytes of memory, by segment",
        "segment",
        segments.iter().map(|segment| (&segment.segment_name, segment.size_bytes)),
    );
    for (name, help) in [
        ("master_nof_allocated_bytes", "Bytes in use on disks behind NVMe over fabrics"),
        ("master_total_nof_capacity_bytes", "Bytes of disks behind NVMe over fabrics"),
    ] {
        writer.gauge(name, help, 0);
    }
    let disks = master.disk_usage();
    writer.gauge("master_allocated_file_size_bytes", "Bytes of objects on nodes' disks", disks.used);
    writer.gauge("master_total_file_capacity_bytes", "Bytes of nodes' disks", disks.capacity);
    writer.gauge("master_key_count", "Objects, including those being written", master.key_count());
    let soft = master.soft_pinned_count();
    writer.gauge("master_soft_pin_key_count", "Soft-pinned objects", soft);
    writer.gauge("master_active_clients", "Clients with a recent heartbeat", master.client_counts().active);
}

/// Families of clients by the time since their last heartbeat. Since 0.3.14, whose suspected clients are the silent ones here.
fn liveness(writer: &mut MetricsWriter<'_>, server: &MasterServer, observer: &FactObserver) {
    let clients = server.master.client_counts();
    let (suspected, offline) = observer.client_transitions();
    for (name, help, value) in [
        ("master_client_liveness_active_clients", "Clients with a recent heartbeat", clients.active),
        (
            "master_client_liveness_suspected_clients",
            "Clients with no recent heartbeat whose objects are still held",
            clients.silent,
        ),
        (
            "master_client_liveness_offline_clients",
            "Always 0: objects of offline clients are removed at once",
            0,
        ),
    ] {
        writer.gauge(name, help, value);
    }
    for (name, help, value) in [
        (
            "master_client_liveness_suspected_transitions_total",
            "Times that a client became silent",
            suspected,
        ),
        (
            "master_client_liveness_offline_transitions_total",
            "Clients removed because of their silence",
            offline,
        ),
    ] {
        writer.counter(name, help, value);
    }
}

/// Families of puts of objects that existed already. Since 0.3.14.
fn existing_objects(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    for (name, method) in [
        ("master_put_start_object_already_exists_total", RpcMethod::PutStart),
        ("master_batch_put_start_object_already_exists_total", RpcMethod::BatchPutStart),
    ] {
        let count = server.counters.call_counts(method).already_exists;
        writer.counter(name, "Objects that were not put because they existed already", count);
    }
}

/// Histogram of the sizes of written objects.
fn value_sizes(writer: &mut MetricsWriter<'_>, sizes: &ValueSizeHistogram) {
    let (counts, sum) = sizes.read();
    let bounds = SIZE_BOUNDS.map(|bound| bound as f64).into_iter().chain([f64::INFINITY]);
    let snapshot = HistogramSnapshot { buckets: bounds.zip(counts).collect(), sum: sum as f64 };
    writer.histogram("master_value_size_bytes", "Sizes of written objects in bytes", &snapshot);
}

/// Families of read hits and misses.
fn reads(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let single = server.counters.call_counts(RpcMethod::GetReplicaList);
    let batch = server.counters.call_counts(RpcMethod::BatchGetReplicaList);
    let total = single.requests + batch.items;
    let found = total.saturating_sub(single.failures + batch.failed_items);
    let counts = server.master.statistics();
    let in_memory = found.saturating_sub(counts.disk_reads);
    writer.counter("mem_cache_hit_nums_", "Object reads served from memory", in_memory);
    let bytes = counts.read_bytes;
    writer.counter("mem_cache_hit_bytes_total", "Bytes of object reads served from memory", bytes);
    writer.counter("file_cache_hit_nums_", "Object reads served from a disk", counts.disk_reads);
    let bytes = counts.disk_read_bytes;
    writer.counter("file_cache_hit_bytes_total", "Bytes of object reads served from a disk", bytes);
    writer.gauge("mem_cache_nums_", "Objects, including those only on disks", server.master.key_count());
    writer.gauge("file_cache_nums_", "Objects on disks", server.master.disk_usage().copies);
    writer.counter("valid_get_nums_", "Object reads that found the object", found);
    writer.counter("total_get_nums_", "Object reads", total);
}

/// Families of evictions and of unfinished puts. Only memory is evicted.
fn evictions(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    const ROUNDS: &str = "Eviction rounds that freed space";
    const ATTEMPTS: &str = "Eviction rounds, including those that found nothing to evict";
    const KEYS: &str = "Evicted objects";
    const BYTES: &str = "Bytes of evicted objects";
    let counts = server.master.statistics();
    writer.counter(
        "master_put_start_alloc_failures_total",
        "Puts rejected for lack of space",
        counts.allocation_failures,
    );
    writer.counter(
        "master_put_start_partial_allocations_total",
        "Puts that got fewer replicas than requested",
        counts.partial_allocations,
    );
    for (name, help, value) in [
        ("master_successful_evictions_total", ROUNDS, counts.eviction_rounds),
        ("master_successful_evictions_mem", ROUNDS, counts.eviction_rounds),
        ("master_attempted_evictions_total", ATTEMPTS, counts.attempted_evictions),
        ("master_attempted_evictions_mem", ATTEMPTS, counts.attempted_evictions),
        ("master_evicted_key_count", KEYS, counts.evicted_keys),
        ("master_evicted_key_count_mem", KEYS, counts.evicted_keys),
        ("master_evicted_size_bytes", BYTES, counts.evicted_bytes),
        ("master_evicted_size_bytes_mem", BYTES, counts.evicted_bytes),
    ] {
        writer.counter(name, help, value);
    }
    writer.counter(
        "master_put_start_discard_cnt",
        "Puts discarded because they were not finished in time",
        counts.discarded_puts,
    );
    writer.counter(
        "master_put_start_release_cnt",
        "Discarded puts whose space was released",
        counts.discarded_puts,
    );
}

/// Families of tenants, if multi-tenancy is enabled.
fn tenants(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let master = &server.master;
    let Ok(quotas) = master.quotas() else { return };
    type QuotaValue = fn(&TenantQuota) -> u64;
    let gauges: [(&str, &str, QuotaValue); 6] = [
        ("mooncake_tenant_quota_requested_bytes", "Requested quota in bytes", |quota| {
            quota.requested_quota_bytes
        }),
        ("mooncake_tenant_quota_effective_bytes", "Effective quota in bytes", |quota| {
            quota.effective_quota_bytes
        }),
        ("mooncake_tenant_quota_charged_bytes", "Bytes in use by the tenant", |quota| quota.charged_bytes),
        ("mooncake_tenant_quota_admission_closed", "1 if new objects of the tenant are rejected", |quota| {
            quota.admission_closed.into()
        }),
        ("mooncake_tenant_quota_over_quota", "1 if the tenant uses more than its quota", |quota| {
            quota.over_quota.into()
        }),
        ("mooncake_tenant_quota_explicit_policy", "1 if the quota was set explicitly", |quota| {
            quota.has_explicit_policy.into()
        }),
    ];
    for (name, help, value_of) in gauges {
        let values = quotas.iter().map(|quota| (&quota.tenant_id, value_of(quota)));
        writer.gauge_by(name, help, "tenant_id", values);
    }
    let sum = |value_of: QuotaValue| quotas.iter().map(value_of).fold(0, u64::saturating_add);
    let sums = [sum(|quota| quota.requested_quota_bytes), sum(|quota| quota.effective_quota_bytes)];
    writer.gauge("mooncake_tenant_quota_requested_bytes_sum", "Requested quota in bytes", sums[0]);
    writer.gauge("mooncake_tenant_quota_effective_bytes_sum", "Effective quota in bytes", sums[1]);
    writer.gauge(
        "mooncake_tenant_quota_allocatable_capacity_bytes",
        "Memory available to all tenants in bytes",
        master.space_usage().capacity,
    );
}

/// Families of promotions from disk to memory.
fn promotions(writer: &mut MetricsWriter<'_>, server: &MasterServer) {
    let (master, counts) = (&server.master, server.master.statistics());
    let promoting = master.disk_usage().promoting;
    writer.gauge("master_promotion_in_flight", "Promotions in flight from disk to memory", promoting);
    let finished = counts.promoted_keys + counts.promotions_failed + counts.promotions_expired;
    let cancelled = counts.promotions.saturating_sub(finished + promoting);
    for (name, help, value) in [
        ("master_promotion_admitted_total", "Promotions started", counts.promotions),
        ("master_promotion_completed_total", "Promotions completed", counts.promoted_keys),
        ("master_promotion_completed_bytes_total", "Bytes of completed promotions", counts.promoted_bytes),
        ("master_promotion_expired_total", "Promotions that timed out", counts.promotions_expired),
        ("master_promotion_failed_total", "Promotions that failed", counts.promotions_failed),
        (
            "master_promotion_cancelled_total",
            "Promotions cancelled because the object was removed",
            cancelled,
        ),
        (
            "master_promotion_rejected_frequency_total",
            "Promotions rejected because the object is read too rarely",
            counts.promotions_rejected_frequency,
        ),
        (
            "master_promotion_rejected_watermark_total",
            "Promotions rejected because memory is nearly full",
            counts.promotions_rejected_watermark,
        ),
        (
            "master_promotion_rejected_cap_total",
            "Promotions rejected because too many are in flight",
            counts.promotions_rejected_cap,
        ),
    ] {
        writer.counter(name, help, value);
    }
}

/// Families of features that this master does not have or does not count.
fn unused(writer: &mut MetricsWriter<'_>) {
    writer.gauge("master_put_start_discarded_staging_size", "Not counted by this master", 0);
    for name in [
        "master_promotion_candidate_recorded_total",
        "master_promotion_candidate_admitted_total",
        "master_promotion_candidate_admission_rejected_total",
        "master_promotion_candidate_expired_evaluated_total",
        "master_promotion_candidate_expired_unevaluated_total",
        "master_promotion_candidate_dropped_limit_total",
    ] {
        writer.counter(name, "Not implemented: rejected promotions are retried on the next read", 0_u64);
    }
    for name in [
        "ha_oplog_last_sequence_id",
        "ha_oplog_applied_sequence_id",
        "ha_oplog_standby_lag",
        "ha_oplog_pending_entries",
        "ha_pending_mutation_queue_size",
        "ha_standby_state",
    ] {
        writer.gauge(name, "Not implemented: Moongate's master has no such replication queue", 0);
    }
    for name in ["master_dfs_allocated_bytes", "master_dfs_total_capacity_bytes", "master_dfs_file_count"] {
        writer.gauge(name, "Not implemented: objects are not stored on distributed file systems", 0);
    }
    const NO_WEIGHTS: &str = "Not implemented: this master has no registry of weights";
    for name in [
        "master_weight_active_leases",
        "master_weight_pending_operations",
        "master_weight_oldest_operation_age_ms",
    ] {
        writer.gauge(name, NO_WEIGHTS, 0);
    }
    writer.counter("master_weight_reconciliation_failures_total", NO_WEIGHTS, 0_u64);
    writer.gauge("mooncake_jemalloc_enabled", "Always 0: this master uses another allocator", 0);
}
