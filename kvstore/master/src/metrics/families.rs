//! Mooncake's families about the state.

use mooncake_wire::admin::TenantQuota;
use mooncake_wire::rpc::RpcMethod;

use super::text::MasterMetricsText;
use crate::http::AdminContext;
use crate::observer::SIZE_BOUNDS;

/// Objects, segments, clients.
pub(super) fn state(text: &mut MasterMetricsText, admin: &AdminContext) {
    let master = &admin.server.master;
    let fill = master.space_usage();
    text.gauge("master_allocated_bytes", "Bytes of memory in use.", fill.used);
    text.gauge("master_total_capacity_bytes", "Bytes of memory in all segments.", fill.capacity);
    let segments = master.segments_detail().segments;
    let mut used = text.gauges("segment_allocated_bytes", "Bytes of memory in use, by segment.");
    for it in &segments {
        used.value(&[("segment", &it.segment_name)], it.allocator_used_bytes);
    }
    let mut sizes = text.gauges("segment_total_capacity_bytes", "Bytes of memory, by segment.");
    for it in &segments {
        sizes.value(&[("segment", &it.segment_name)], it.size_bytes);
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
    text.gauge("master_key_count", "Objects, including those that are being written.", master.key_count());
    let soft = master.soft_pinned_count();
    text.gauge("master_soft_pin_key_count", "Objects that are pinned softly.", soft);
    text.gauge("master_active_clients", "Clients that are heard of.", master.client_counts().0);
    value_sizes(text, admin);
}

fn value_sizes(text: &mut MasterMetricsText, admin: &AdminContext) {
    let (buckets, sum) = admin.observer.sizes.read();
    let bounds = SIZE_BOUNDS.iter().map(|bound| format!("{bound}.000000")).chain(["+Inf".to_owned()]);
    text.histograms("master_value_size_bytes", "Sizes of objects that were written.").histogram(
        &[],
        bounds.zip(buckets),
        sum,
    );
}

/// What readers found.
pub(super) fn reads(text: &mut MasterMetricsText, admin: &AdminContext) {
    let single = admin.server.counters.call_counts(RpcMethod::GetReplicaList);
    let batch = admin.server.counters.call_counts(RpcMethod::BatchGetReplicaList);
    let total = single.requests + batch.items;
    let found = total.saturating_sub(single.failures + batch.failed_items);
    let counts = admin.server.master.statistics();
    let in_memory = found.saturating_sub(counts.disk_reads);
    text.counter("mem_cache_hit_nums_", "Objects that a reader found in memory.", in_memory);
    let bytes = counts.read_bytes;
    text.counter("mem_cache_hit_bytes_total", "Bytes of objects that a reader found in memory.", bytes);
    text.counter("file_cache_hit_nums_", "Objects that a reader found on a disk only.", counts.disk_reads);
    let bytes = counts.disk_read_bytes;
    text.counter("file_cache_hit_bytes_total", "Bytes of objects that a reader found on a disk only.", bytes);
    text.gauge(
        "mem_cache_nums_",
        "Objects, including those that are only on disks.",
        admin.server.master.key_count(),
    );
    text.gauge("file_cache_nums_", "Objects on disks.", admin.server.master.disk_usage().copies);
    text.counter("valid_get_nums_", "Objects that a reader found.", found);
    text.counter("total_get_nums_", "Objects that a reader looked for.", total);
}

/// Eviction, and puts that were not ended. Nothing but memory is evicted.
pub(super) fn evictions(text: &mut MasterMetricsText, admin: &AdminContext) {
    let counts = admin.server.master.statistics();
    text.counter(
        "master_put_start_alloc_failures_total",
        "Puts that were refused for want of space.",
        counts.allocation_failures,
    );
    text.counter(
        "master_put_start_partial_allocations_total",
        "Puts that got fewer replicas than they asked for.",
        counts.partial_allocations,
    );
    for (suffix, round) in [("_total", ""), ("_mem", "_mem")] {
        let successful = format!("master_successful_evictions{suffix}");
        text.counter(&successful, "Rounds of eviction that made room.", counts.eviction_rounds);
        let attempted = format!("master_attempted_evictions{suffix}");
        text.counter(
            &attempted,
            "Rounds of eviction, also those that found nothing to evict.",
            counts.attempted_evictions,
        );
        let keys = format!("master_evicted_key_count{round}");
        text.counter(&keys, "Objects that were evicted.", counts.evicted_keys);
        let bytes = format!("master_evicted_size_bytes{round}");
        text.counter(&bytes, "Bytes of objects that were evicted.", counts.evicted_bytes);
    }
    text.counter("master_put_start_discard_cnt", "Puts that were not ended in time.", counts.discarded_puts);
    text.counter(
        "master_put_start_release_cnt",
        "Puts that were not ended in time, and whose space is free.",
        counts.discarded_puts,
    );
}

/// Tenants, if there are any.
pub(super) fn tenants(text: &mut MasterMetricsText, admin: &AdminContext) {
    let master = &admin.server.master;
    let Ok(quotas) = master.quotas() else { return };
    type Figure = fn(&TenantQuota) -> u64;
    let figures: [(&str, &str, Figure); 6] = [
        ("requested_bytes", "Bytes that were asked for.", |it| it.requested_quota_bytes),
        ("effective_bytes", "Bytes that a tenant has.", |it| it.effective_quota_bytes),
        ("charged_bytes", "Bytes in use.", |it| it.charged_bytes),
        ("admission_closed", "1 if nothing more is taken.", |it| it.admission_closed.into()),
        ("over_quota", "1 if a tenant uses more than it has.", |it| it.over_quota.into()),
        ("explicit_policy", "1 if somebody set the quota.", |it| it.has_explicit_policy.into()),
    ];
    for (name, help, figure) in figures {
        let name = format!("mooncake_tenant_quota_{name}");
        let mut family = text.gauges(&name, help);
        quotas.iter().for_each(|it| family.value(&[("tenant_id", &it.tenant_id)], figure(it)));
    }
    let capacity = master.space_usage().capacity;
    text.gauge("mooncake_tenant_quota_allocatable_capacity_bytes", "Bytes for all tenants.", capacity);
    for (name, help, figure) in figures.into_iter().take(2) {
        let name = format!("mooncake_tenant_quota_{name}_sum");
        let sum: u128 = quotas.iter().map(|it| u128::from(figure(it))).sum();
        text.gauge(&name, help, sum);
    }
}

/// Objects on their way from disks to memory.
pub(super) fn promotions(text: &mut MasterMetricsText, admin: &AdminContext) {
    let (master, counts) = (&admin.server.master, admin.server.master.statistics());
    let promoting = master.disk_usage().promoting;
    text.gauge("master_promotion_in_flight", "Objects on their way from a disk to memory.", promoting);
    let ended = counts.promoted_keys + counts.promotions_failed + counts.promotions_expired;
    let cancelled = counts.promotions.saturating_sub(ended + promoting);
    for (what, help, value) in [
        ("admitted_total", "Objects that were asked for.", counts.promotions),
        ("completed_total", "Objects that are in memory again.", counts.promoted_keys),
        ("completed_bytes_total", "Bytes of objects that are in memory again.", counts.promoted_bytes),
        ("expired_total", "Objects that did not come in time.", counts.promotions_expired),
        ("failed_total", "Objects that could not be brought.", counts.promotions_failed),
        ("cancelled_total", "Objects that went before they came.", cancelled),
        (
            "rejected_frequency_total",
            "Reads of objects that are read too rarely.",
            counts.promotions_rejected_frequency,
        ),
        (
            "rejected_watermark_total",
            "Reads while memory was nearly full.",
            counts.promotions_rejected_watermark,
        ),
        ("rejected_cap_total", "Reads while too many were on their way.", counts.promotions_rejected_cap),
    ] {
        text.counter(&format!("master_promotion_{what}"), help, value);
    }
}

/// What this master does not do, and what it does not count.
pub(super) fn unused(text: &mut MasterMetricsText) {
    text.gauge("master_put_start_discarded_staging_size", "Not counted by this master.", 0);
    for what in [
        "candidate_recorded_total",
        "candidate_admitted_total",
        "candidate_admission_rejected_total",
        "candidate_expired_evaluated_total",
        "candidate_expired_unevaluated_total",
        "candidate_dropped_limit_total",
    ] {
        text.counter(
            &format!("master_promotion_{what}"),
            "What was refused is tried with the next read, not by itself.",
            0,
        );
    }
    for what in [
        "oplog_last_sequence_id",
        "oplog_applied_sequence_id",
        "oplog_standby_lag",
        "oplog_pending_entries",
        "pending_mutation_queue_size",
        "standby_state",
    ] {
        text.gauge(&format!("ha_{what}"), "There is one master only.", 0);
    }
}
