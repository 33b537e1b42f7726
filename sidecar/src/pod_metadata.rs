//! Parses labels and annotations of the pod from files of a downward API volume, one `key="value"` per line.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use moongate_discovery::PhysicalLocation;
use rbg_api::keys;
use tokio::io::AsyncReadExt as _;

/// Largest accepted file in bytes; Kubernetes limits all annotations of a pod to 256 KiB.
const MAX_FILE: u64 = 1 << 20;
/// Kubernetes' own label, which newer API servers copy from nodes to pods.
const ZONE: &str = "topology.kubernetes.io/zone";

/// Labels and annotations by key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodMetadata(BTreeMap<String, String>);

impl PodMetadata {
    /// Reads all files; for a key in several files, the first has precedence.
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

    /// The pod's location: declared levels, completed from its labels and annotations.
    pub(crate) fn fill_location(&self, declared: &PhysicalLocation) -> PhysicalLocation {
        let level =
            |declared: &Option<String>, key| declared.clone().or_else(|| self.get(key).map(str::to_owned));
        PhysicalLocation {
            zone: level(&declared.zone, keys::ZONE).or_else(|| self.get(ZONE).map(str::to_owned)),
            rack: level(&declared.rack, keys::RACK),
            node: declared.node.clone(),
            nvlink_domain: level(&declared.nvlink_domain, keys::NVLINK_DOMAIN),
        }
    }
}

/// Parses the lines. Values are quoted as in Go, which for annotations equals JSON. Lines without a pair are skipped.
fn parse(text: &str) -> impl Iterator<Item = (String, String)> {
    text.lines().filter_map(|line| {
        let (key, quoted) = line.split_once('=')?;
        Some((key.to_owned(), serde_json::from_str(quoted).ok()?))
    })
}

/// Reads a file of at most [`MAX_FILE`] bytes.
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
    fn values_are_unquoted_and_flags_have_precedence() {
        let text = "moongate.io/rack=\"r1\"\nmoongate.io/lora-adapters=\"a=/x\\nb=\\\"/y\\\"\"\nnonsense\nz=unquoted\n";
        let info = PodMetadata(parse(text).collect());
        assert_eq!(info.get("moongate.io/lora-adapters"), Some("a=/x\nb=\"/y\""));
        assert_eq!(info.0.len(), 2);
        let declared = PhysicalLocation { zone: Some("z".into()), ..PhysicalLocation::default() };
        let location = info.fill_location(&declared);
        assert_eq!((location.zone.as_deref(), location.rack.as_deref()), (Some("z"), Some("r1")));
        let declared = PhysicalLocation { rack: Some("r2".into()), ..PhysicalLocation::default() };
        assert_eq!(info.fill_location(&declared).rack.as_deref(), Some("r2"));
    }
}
