//! Which versions of engines may pair: the setting, and the versions that are declared compatible.

use std::str::FromStr;
use std::sync::Arc;

use clap::ValueEnum;
use moongate_discovery::EngineFacts;

/// Value of `--pair-versions`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum VersionPairing {
    /// Versions do not matter.
    Any,
    /// Engines of the same version, unless a model has no such pair at all, or one of its engines does not report its version.
    #[default]
    Preferred,
    /// Engines of the same version only. Requests wait while there is no such pair.
    Equal,
}

/// Versions whose engines may pair as if they were equal: value of `--compatible-versions`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompatibleVersions(Vec<String>);

/// Why a list of compatible versions is not accepted.
#[derive(Debug, thiserror::Error)]
#[error("expected at least two versions, as 0.5.5=0.5.6")]
pub struct InvalidCompatibleVersions;

impl FromStr for CompatibleVersions {
    type Err = InvalidCompatibleVersions;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let versions: Vec<String> =
            text.split('=').map(|version| release(version.trim()).to_owned()).collect();
        let is_complete = versions.len() > 1 && versions.iter().all(|version| !version.is_empty());
        is_complete.then_some(Self(versions)).ok_or(InvalidCompatibleVersions)
    }
}

/// Which versions may pair. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VersionRule {
    pub(super) pairing: VersionPairing,
    /// Lists without common versions.
    compatible: Arc<[Vec<String>]>,
}

impl VersionRule {
    /// Lists that share a version are merged.
    pub(crate) fn new(pairing: VersionPairing, lists: &[CompatibleVersions]) -> Self {
        let mut merged: Vec<Vec<String>> = Vec::new();
        for CompatibleVersions(versions) in lists {
            let mut all = versions.clone();
            merged.retain_mut(|other| {
                let is_separate = !other.iter().any(|version| all.contains(version));
                if !is_separate {
                    all.append(other);
                }
                is_separate
            });
            merged.push(all);
        }
        Self { pairing, compatible: merged.into() }
    }

    /// What two engines that may pair have in common: their version, or the first of those that are compatible with it; empty if the
    /// engine does not report a version.
    pub(super) fn class<'a>(&'a self, facts: &'a EngineFacts) -> &'a str {
        let version = release(&facts.version);
        let list = self.compatible.iter().find(|list| list.iter().any(|listed| listed == version));
        list.and_then(|list| list.first()).map_or(version, String::as_str)
    }

    /// Whether two engines report versions that are neither equal nor declared compatible.
    pub(crate) fn are_mixed(&self, prefill: &EngineFacts, decode: &EngineFacts) -> bool {
        self.class(prefill) != self.class(decode)
    }
}

/// The version without its build, such as `+cu129`, which differs between images of one release.
fn release(version: &str) -> &str {
    version.split_once('+').map_or(version, |(release, _)| release)
}

#[cfg(test)]
mod tests {
    use moongate_discovery::EngineKind;

    use super::*;

    fn facts(version: &str) -> EngineFacts {
        EngineFacts { version: version.to_owned(), ..EngineFacts::unreported(EngineKind::Sglang) }
    }

    #[test]
    fn compatible_versions_count_as_equal() {
        let lists: Vec<CompatibleVersions> =
            ["1=2+cu129", "4 = 5", "3=2"].iter().map(|text| text.parse().unwrap()).collect();
        let rule = VersionRule::new(VersionPairing::Equal, &lists);
        let mixed = |one: &str, other: &str| rule.are_mixed(&facts(one), &facts(other));
        for (one, other) in [("1", "2"), ("1+cu128", "3"), ("4", "5"), ("6", "6+x")] {
            assert!(!mixed(one, other), "{one} and {other}");
        }
        for (one, other) in [("3", "4"), ("1", "6"), ("", "1")] {
            assert!(mixed(one, other), "{one} and {other}");
        }
    }

    #[test]
    fn lists_of_fewer_than_two_versions_are_refused() {
        for text in ["", "1", "1=", "=1", "1=+cu129"] {
            let error = text.parse::<CompatibleVersions>().unwrap_err().to_string();
            assert!(error.contains("0.5.5=0.5.6"), "{text}: {error}");
        }
    }
}
