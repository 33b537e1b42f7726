//! Memory limit of this process, above which the kernel kills it.

use std::fs;
use std::path::{Path, PathBuf};

/// The minimum of the machine's memory and the limits of the process's control groups (v1 and v2). `None` if none of them can be read.
#[must_use]
pub fn memory_limit() -> Option<u64> {
    cgroup_limit_below(Path::new("/"))
}

fn cgroup_limit_below(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits =
        groups.lines().flat_map(|line| cgroup_limit_files(root, line)).filter_map(|file| number(&file));
    limits.chain(total_memory(root)).min()
}

/// Limit files of a control group and all its ancestors. In a container the group's own path may not exist, because the mount's root is the
/// group itself: the root comes last.
fn cgroup_limit_files(root: &Path, line: &str) -> Vec<PathBuf> {
    // hierarchy-ID:controllers:path
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { return Vec::new() };
    let (mount, file) = if controllers.is_empty() {
        ("sys/fs/cgroup", "memory.max")
    } else if controllers.split(',').any(|controller| controller == "memory") {
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
    } else {
        return Vec::new();
    };
    let groups = Path::new(path.trim_start_matches('/')).ancestors();
    groups.map(|group| root.join(mount).join(group).join(file)).collect()
}

/// The number in a file; `None` for `max` and missing files.
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn total_memory(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"))?;
    kib.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        cgroup_limit_below(root.path())
    }

    const MEMORY: (&str, &str) = ("proc/meminfo", "MemTotal:       1024 kB\nMemFree: 1 kB\n");

    #[test]
    fn the_lowest_limit_counts() {
        let group = ("proc/self/cgroup", "0::/kubepods/pod1/c1\n");
        assert_eq!(limit(&[]), None);
        assert_eq!(limit(&[MEMORY]), Some(1 << 20));
        let max = ("sys/fs/cgroup/kubepods/pod1/c1/memory.max", "max\n");
        assert_eq!(limit(&[MEMORY, group, max]), Some(1 << 20));
        let pod = ("sys/fs/cgroup/kubepods/pod1/memory.max", "4096\n");
        assert_eq!(limit(&[MEMORY, group, max, pod]), Some(4096));
        // With its own namespace, a container's group is the root of its mount.
        assert_eq!(
            limit(&[MEMORY, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "8192\n")]),
            Some(8192)
        );
    }

    #[test]
    fn cgroup_v1_limits_are_read() {
        let group = ("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/docker/c1\n0::/\n");
        let own = ("sys/fs/cgroup/memory/docker/c1/memory.limit_in_bytes", "2048\n");
        let none = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit(&[MEMORY, group, own, none]), Some(2048));
        assert_eq!(limit(&[MEMORY, group, none]), Some(1 << 20));
        // The container sees the host's path, but its own group as the mount's root.
        assert_eq!(
            limit(&[MEMORY, group, ("sys/fs/cgroup/memory/memory.limit_in_bytes", "512\n")]),
            Some(512)
        );
    }

    #[test]
    fn this_machine_has_a_limit() {
        assert!(memory_limit().is_some_and(|bytes| bytes > 1 << 20));
    }
}
