//! Memory of this process, as the kernel reports it. Since Mooncake 0.3.14.

use moongate_runtime::metrics::MetricsWriter;

/// Metric names with their descriptions, and the members of `/proc/self/status` that they are read from, in kB.
const FAMILIES: [(&str, &str, &str); 7] = [
    ("mooncake_process_rss_bytes", "Resident memory of the process in bytes", "VmRSS"),
    ("mooncake_process_rss_peak_bytes", "Highest resident memory of the process so far in bytes", "VmHWM"),
    ("mooncake_process_rss_anon_bytes", "Resident anonymous memory of the process in bytes", "RssAnon"),
    ("mooncake_process_rss_file_bytes", "Resident file-backed memory of the process in bytes", "RssFile"),
    ("mooncake_process_rss_shmem_bytes", "Resident shared memory of the process in bytes", "RssShmem"),
    ("mooncake_process_swap_bytes", "Memory of the process in swap space in bytes", "VmSwap"),
    ("mooncake_process_vsize_bytes", "Virtual memory of the process in bytes", "VmSize"),
];

/// Families whose member the kernel does not report are absent.
pub(super) fn all(writer: &mut MetricsWriter<'_>) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    for (name, help, member) in FAMILIES {
        if let Some(bytes) = bytes_of(&status, member) {
            writer.gauge(name, help, bytes);
        }
    }
}

fn bytes_of(status: &str, member: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(member)?.strip_prefix(':'))?;
    let kilobytes: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_the_status_are_parsed() {
        let status = "VmSize:\t  200 kB\nVmRSSx:\t 1 kB\nVmRSS:\t    10 kB\nVmSwap:\t x kB\n";
        assert_eq!(bytes_of(status, "VmRSS"), Some(10_240));
        assert_eq!(bytes_of(status, "VmSwap"), None);
        assert_eq!(bytes_of(status, "RssAnon"), None);
    }
}
