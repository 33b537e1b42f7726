//! Settings of offloading to nodes' disks and promotion back to memory.

use moongate_master_core::DiskTierOptions;

use super::{FlagError, FlagValues};

/// Settings with `--enable_offload`. `cap_ratio` is the checked value of `--offload_cap_ratio`.
pub(super) fn disks(
    values: &FlagValues,
    cap_ratio: Result<f64, FlagError>,
) -> Result<DiskTierOptions, FlagError> {
    let promotion_reads = values.number("promotion_admission_threshold").clamp(1, u64::from(u8::MAX));
    Ok(DiskTierOptions {
        on_evict: values.is_on("offload_on_evict"),
        force_evict: values.is_on("offload_force_evict"),
        queue_limit: values.size("offloading_queue_limit"),
        cap_ratio: cap_ratio?,
        promote_on_hit: values.is_on("promotion_on_hit"),
        promotion_reads: u8::try_from(promotion_reads).unwrap_or(u8::MAX),
        promotion_limit: values.size("promotion_queue_limit"),
        promotions_per_heartbeat: values.size("promotion_max_per_heartbeat").max(1),
    })
}

#[cfg(test)]
mod tests {
    use moongate_master_core::DiskTierOptions;

    use crate::flags::options::tests::options;

    #[test]
    fn disk_flags_are_applied() {
        let line = "--enable_offload --offload_on_evict --offloading_queue_limit=7 --promotion_on_hit \
                    --promotion_admission_threshold=1000 --promotion_max_per_heartbeat=0";
        let tier = options(line).unwrap().server.core.disks.unwrap();
        let expected = DiskTierOptions {
            on_evict: true,
            queue_limit: 7,
            promote_on_hit: true,
            promotion_reads: 255,
            ..DiskTierOptions::default()
        };
        assert_eq!(tier, expected);
        assert_eq!(options("--enable_offload").unwrap().server.core.disks, Some(DiskTierOptions::default()));
        assert_eq!(options("--offload_on_evict").unwrap().server.core.disks, None);
    }
}
