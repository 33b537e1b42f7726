//! Storage media of blocks.

use std::fmt;

/// Storage medium of a block, by the publisher's name. Names are case-sensitive: vLLM's own host memory is `CPU`, but blocks that
/// its Mooncake connector has put into the store are `cpu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StorageMedium<'a> {
    /// `GPU`: the engine's own KV cache, on CPU engines too.
    Gpu,
    /// `CPU`: the engine's host memory (vLLM).
    Cpu,
    /// `CPU_PINNED`: the engine's host memory (SGLang).
    CpuPinned,
    Disk,
    /// `STORAGE`: external storage of a connector (vLLM).
    Storage,
    /// `EXTERNAL`: a pool shared by engines (SGLang).
    External,
    /// `cpu`: memory of the Mooncake store.
    StoreMemory,
    /// `disk`: disk of the Mooncake store.
    StoreDisk,
    Other(&'a str),
}

const NAMES: &[(StorageMedium<'static>, &str)] = &[
    (StorageMedium::Gpu, "GPU"),
    (StorageMedium::Cpu, "CPU"),
    (StorageMedium::CpuPinned, "CPU_PINNED"),
    (StorageMedium::Disk, "DISK"),
    (StorageMedium::Storage, "STORAGE"),
    (StorageMedium::External, "EXTERNAL"),
    (StorageMedium::StoreMemory, "cpu"),
    (StorageMedium::StoreDisk, "disk"),
];

impl<'a> StorageMedium<'a> {
    /// The medium of this name.
    pub fn from_name(name: &'a str) -> Self {
        NAMES.iter().find(|(_, known)| *known == name).map_or(Self::Other(name), |&(medium, _)| medium)
    }

    /// The name on the wire.
    pub fn name(self) -> &'a str {
        match self {
            Self::Other(name) => name,
            known => NAMES.iter().find(|(medium, _)| *medium == known).map_or("", |&(_, name)| name),
        }
    }
}

impl fmt::Display for StorageMedium<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in ["GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL", "cpu", "disk", "REMOTE", ""] {
            assert_eq!(StorageMedium::from_name(name).name(), name);
        }
        assert_eq!(StorageMedium::from_name("REMOTE"), StorageMedium::Other("REMOTE"));
        assert_ne!(StorageMedium::from_name("cpu"), StorageMedium::from_name("CPU"));
    }
}
