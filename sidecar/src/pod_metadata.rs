//! What Kubernetes writes about the pod into files of a downward API volume: labels and annotations, one `key="value"` a line.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use moongate_discovery::PhysicalLocation;
use rbg_api::keys;
use tokio::io::AsyncReadExt as _;

/// Largest file that is read; all annotations of a pod have 256 KiB at most.
const MAX_FILE: u64 = 1 << 20;
/// Kubernetes' own label, copied from nodes to pods by newer API servers.
const ZONE: &str = "topology.kubernetes.io/zone";

/// Labels and annotations by key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodMetadata(BTreeMap<String, String>);

impl PodMetadata {
    /// Reads all files; of keys that several have, the first wins.
    pub(crate) async fn read(files: &[PathBuf]) -> io::Result<Self> {
        let mut all = Self::default();
        for file in files {
            for (key, value) in parse(&read_bounded(file).await?) {
                all.0.entry(key).or_insert(value);
            }
        }
        Ok(all)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Where the pod is; what `told` says already stays.
    pub(crate) fn fill_location(&self, told: &PhysicalLocation) -> PhysicalLocation {
        let or = |told: &Option<String>, key| told.clone().or_else(|| self.get(key).map(str::to_owned));
        PhysicalLocation {
            zone: or(&told.zone, keys::ZONE).or_else(|| self.get(ZONE).map(str::to_owned)),
            rack: or(&told.rack, keys::RACK),
            node: told.node.clone(),
            nvlink_domain: or(&told.nvlink_domain, keys::NVLINK_DOMAIN),
        }
    }
}

/// Values are quoted as in Go, which for what annotations hold is as in JSON. Lines that are no pair are skipped.
fn parse(text: &str) -> impl Iterator<Item = (String, String)> {
    text.lines().filter_map(|line| {
        let (key, quoted) = line.split_once('=')?;
        Some((key.to_owned(), serde_json::from_str(quoted).ok()?))
    })
}

/// A file's text.
pub(crate) async fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let read = tokio::fs::File::open(path).await?.take(MAX_FILE + 1).read_to_string(&mut text).await?;
    if read as u64 > MAX_FILE {
        return Err(io::Error::other(format!("{} has more than {MAX_FILE} bytes", path.display())));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_and_line_breaks_are_undone_and_flags_win() {
        let text = "moongate.io/rack=\"r1\"\nmoongate.io/lora-adapters=\"a=/x\\nb=\\\"/y\\\"\"\nnonsense\nz=unquoted\n";
        let info = PodMetadata(parse(text).collect());
        assert_eq!(info.get("moongate.io/lora-adapters"), Some("a=/x\nb=\"/y\""));
        assert_eq!(info.0.len(), 2);
        let told = PhysicalLocation { zone: Some("z".into()), ..PhysicalLocation::default() };
        let place = info.fill_location(&told);
        assert_eq!((place.zone.as_deref(), place.rack.as_deref()), (Some("z"), Some("r1")));
        let told = PhysicalLocation { rack: Some("r2".into()), ..PhysicalLocation::default() };
        assert_eq!(info.fill_location(&told).rack.as_deref(), Some("r2"));
    }
}
