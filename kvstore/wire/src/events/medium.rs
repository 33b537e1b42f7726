//! Where a block lies.

use std::fmt;

/// Where a block lies, in the publisher's words. Names are case-sensitive: vLLM's own host memory is `CPU`, but blocks that its
/// Mooncake connector has put into the store are `cpu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Medium<'a> {
    /// `GPU`: the engine's own KV cache, on CPU engines too.
    Gpu,
    /// `CPU`: the engine's host memory (vLLM).
    Cpu,
    /// `CPU_PINNED`: the engine's host memory (SGLang).
    CpuPinned,
    /// `DISK`: the engine's disk.
    Disk,
    /// `STORAGE`: behind a connector (vLLM).
    Storage,
    /// `EXTERNAL`: a pool that engines share (SGLang).
    External,
    /// `cpu`: memory of the Mooncake store.
    StoreMemory,
    /// `disk`: disk of the Mooncake store.
    StoreDisk,
    /// Any other name.
    Other(&'a str),
}

const NAMES: &[(Medium<'static>, &str)] = &[
    (Medium::Gpu, "GPU"),
    (Medium::Cpu, "CPU"),
    (Medium::CpuPinned, "CPU_PINNED"),
    (Medium::Disk, "DISK"),
    (Medium::Storage, "STORAGE"),
    (Medium::External, "EXTERNAL"),
    (Medium::StoreMemory, "cpu"),
    (Medium::StoreDisk, "disk"),
];

impl<'a> Medium<'a> {
    /// The medium of this name.
    pub fn from_name(name: &'a str) -> Self {
        NAMES.iter().find(|(_, known)| *known == name).map_or(Self::Other(name), |&(medium, _)| medium)
    }

    /// The name that travels.
    pub fn name(self) -> &'a str {
        match self {
            Self::Other(name) => name,
            known => NAMES.iter().find(|(medium, _)| *medium == known).map_or("", |&(_, name)| name),
        }
    }
}

impl fmt::Display for Medium<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_kept() {
        for name in ["GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL", "cpu", "disk", "REMOTE", ""] {
            assert_eq!(Medium::from_name(name).name(), name);
        }
        assert_eq!(Medium::from_name("REMOTE"), Medium::Other("REMOTE"));
        assert_ne!(Medium::from_name("cpu"), Medium::from_name("CPU"));
    }
}
