//! The ladder of a group: levels of nearness, which roles shall be near which, and over what a role is spread.
//!
//! A group says it in annotations, which are in no revision. What it comes to for a role stands in an annotation of the
//! role's workload and instances, from where pods get it when they are made ([`crate::nearness`]). So a change of the
//! ladder restarts no pod: it counts for pods that are made from then on.

use rbg_api::v1alpha2::{RoleBasedGroup, RoleSpec};
use rbg_api::{RoleKind, TopologyLevel, keys};
use serde::{Deserialize, Serialize};

use crate::RenderError;

/// What a spread says that shall not be.
const NONE: &str = "none";
/// Longest name of a label, and longest prefix before its `/`.
const MAX_NAME: usize = 63;
const MAX_PREFIX: usize = 253;

/// A level and the label of nodes by which it is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyKey {
    /// The level.
    pub level: TopologyLevel,
    /// The label's key.
    pub label: String,
}

/// What the pods of one role are told of nearness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleTopology {
    /// Nearest first.
    pub rungs: Vec<TopologyKey>,
    /// Roles that its pods shall be near to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub near: Vec<String>,
    /// Over how many rungs, from the nearest on, the group is not drawn together as a whole: instances of the role are
    /// spread over the domains of the last of them. 0: they are not spread.
    #[serde(default)]
    pub spread: usize,
}

impl RoleTopology {
    /// As the annotation of a workload or an instance has it.
    ///
    /// # Errors
    /// [`RenderError::Topology`].
    pub fn parse(text: &str) -> Result<Self, RenderError> {
        serde_json::from_str(text)
            .map_err(|error| RenderError::Topology { key: keys::TOPOLOGY, cause: error.to_string() })
    }

    /// The annotation's text.
    #[must_use]
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The ladder of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupTopology {
    keys: Vec<TopologyKey>,
    /// Pairs: the first shall be near the second. `None`: by what roles do.
    near_pairs: Option<Vec<(String, String)>>,
    spread_levels: usize,
}

impl GroupTopology {
    /// What a group says; `None` if it says nothing.
    pub(crate) fn from_group(group: &RoleBasedGroup) -> Result<Option<Self>, RenderError> {
        let wrong = |key, cause| RenderError::Topology { key, cause };
        let annotations = group.metadata.annotations.as_ref();
        let said = |key| annotations?.get(key).map(|text| text.trim()).filter(|text| !text.is_empty());
        let Some(text) = said(keys::TOPOLOGY_LADDER) else {
            let lonely =
                [keys::TOPOLOGY_NEAR, keys::TOPOLOGY_SPREAD].into_iter().find(|key| said(key).is_some());
            return match lonely {
                Some(key) => Err(wrong(key, format!("it says nothing without {}", keys::TOPOLOGY_LADDER))),
                None => Ok(None),
            };
        };
        let rungs = parse_keys(text).map_err(|cause| wrong(keys::TOPOLOGY_LADDER, cause))?;
        let near =
            said(keys::TOPOLOGY_NEAR).map(|text| parse_near_pairs(text, &group.spec.roles)).transpose();
        let spread = parse_spread(said(keys::TOPOLOGY_SPREAD), &rungs);
        Ok(Some(Self {
            near_pairs: near.map_err(|cause| wrong(keys::TOPOLOGY_NEAR, cause))?,
            spread_levels: spread.map_err(|cause| wrong(keys::TOPOLOGY_SPREAD, cause))?,
            keys: rungs,
        }))
    }

    /// What it comes to for one of the roles.
    pub(crate) fn role(&self, name: &str, roles: &[RoleSpec]) -> RoleTopology {
        let near = match &self.near_pairs {
            Some(pairs) => pairs.iter().filter(|(who, _)| who == name).map(|(_, to)| to.clone()).collect(),
            None => {
                let wanted = related_roles(RoleKind::from_role_name(name));
                let is_wanted = |role: &&RoleSpec| {
                    RoleKind::from_role_name(&role.name).is_some_and(|duty| wanted.contains(&duty))
                };
                roles.iter().filter(is_wanted).map(|role| role.name.clone()).collect()
            }
        };
        RoleTopology { rungs: self.keys.clone(), near, spread: self.spread_levels }
    }
}

/// The rungs of a group's ladder; none, if it has none.
///
/// # Errors
/// [`RenderError::Topology`], if what the group says about nearness cannot be followed.
pub fn topology_keys(group: &RoleBasedGroup) -> Result<Vec<TopologyKey>, RenderError> {
    Ok(GroupTopology::from_group(group)?.map(|ladder| ladder.keys).unwrap_or_default())
}

/// Prefills hand over to decodes; engines read from the store, which costs no network on their own node.
fn related_roles(duty: Option<RoleKind>) -> &'static [RoleKind] {
    match duty {
        Some(RoleKind::Prefill) => &[RoleKind::Decode],
        Some(RoleKind::Store) => &[RoleKind::Prefill, RoleKind::Plain],
        Some(RoleKind::Decode | RoleKind::Plain) | None => &[],
    }
}

fn parse_keys(text: &str) -> Result<Vec<TopologyKey>, String> {
    let mut rungs: Vec<TopologyKey> = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (name, label) =
            part.split_once('=').map_or((part, None), |(name, label)| (name.trim(), Some(label.trim())));
        let level = TopologyLevel::parse(name).ok_or_else(|| {
            format!(
                "`{name}` is no level; write node, nvlink-domain, rack or zone, each perhaps with `=LABEL`"
            )
        })?;
        let label = label.or(level.default_label()).ok_or_else(|| {
            format!(
                "there is no usual label for {name}; write `{name}=LABEL` with the label that your nodes have"
            )
        })?;
        if !is_label_key(label) {
            return Err(format!("`{label}` is no key of a label"));
        }
        if rungs.iter().any(|rung| rung.level == level || rung.label == label) {
            return Err(format!("`{part}` repeats a level or a label"));
        }
        rungs.push(TopologyKey { level, label: label.to_owned() });
    }
    Ok(rungs)
}

fn parse_near_pairs(text: &str, roles: &[RoleSpec]) -> Result<Vec<(String, String)>, String> {
    let role = |name: &str| {
        let name = name.trim();
        let found = roles.iter().find(|role| role.name == name);
        found.map(|role| role.name.clone()).ok_or_else(|| format!("`{name}` is no role of this group"))
    };
    let pair = |part: &str| {
        let (who, to) =
            part.split_once(':').ok_or_else(|| format!("`{}` is no pair; write ROLE:ROLE", part.trim()))?;
        Ok((role(who)?, role(to)?))
    };
    text.split(',').map(pair).collect()
}

fn parse_spread(said: Option<&str>, rungs: &[TopologyKey]) -> Result<usize, String> {
    let at = |level: TopologyLevel| rungs.iter().position(|rung| rung.level == level).map(|at| at + 1);
    match said {
        None => Ok(at(TopologyLevel::Node).unwrap_or(0)),
        Some(NONE) => Ok(0),
        Some(name) => TopologyLevel::parse(name).and_then(at).ok_or_else(|| {
            let levels: Vec<&str> = rungs.iter().map(|rung| rung.level.name()).collect();
            format!("`{name}` is no level of the ladder; write {} or {NONE}", levels.join(", "))
        }),
    }
}

/// `[prefix/]name`, as Kubernetes has it.
fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let has_ends = |text: &str| is_end(text.bytes().next()) && is_end(text.bytes().next_back());
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_prefix = |prefix: &str| {
        let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let is_part = |part: &str| has_ends(part) && part.bytes().all(is_inner);
        prefix.len() <= MAX_PREFIX && prefix.split('.').all(is_part)
    };
    name.len() <= MAX_NAME && has_ends(name) && name.bytes().all(is_inner) && prefix.is_none_or(is_prefix)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const NAMES: [&str; 5] = ["router", "prefill", "decode", "kv-store", "mooncake-master"];

    fn group(said: &[(&str, &str)]) -> RoleBasedGroup {
        let annotations: BTreeMap<&str, &str> = said.iter().copied().collect();
        let roles = NAMES.map(|name| json!({ "name": name }));
        let metadata = json!({ "name": "g", "annotations": annotations });
        serde_json::from_value(json!({ "metadata": metadata, "spec": { "roles": roles } })).unwrap()
    }

    fn ladder(said: &[(&str, &str)]) -> Result<Option<GroupTopology>, String> {
        GroupTopology::from_group(&group(said)).map_err(|error| error.to_string())
    }

    #[test]
    fn roles_are_near_by_what_they_do() {
        let said = [(keys::TOPOLOGY_LADDER, "nvlink-domain, node, rack = example.com/rack, zone")];
        let ladder = ladder(&said).unwrap().unwrap();
        let roles = group(&[]).spec.roles;
        let of = |name| ladder.role(name, &roles);
        let labels = [
            "nvidia.com/gpu.clique",
            "kubernetes.io/hostname",
            "example.com/rack",
            "topology.kubernetes.io/zone",
        ];
        assert_eq!(of("router").rungs.iter().map(|rung| rung.label.as_str()).collect::<Vec<_>>(), labels);
        let near = NAMES.map(|name| of(name).near.join(" "));
        assert_eq!(near, ["", "decode", "", "prefill", ""]);
        assert_eq!(of("decode").spread, 2, "over nodes");
    }

    #[test]
    fn a_group_may_say_who_is_near_whom_and_what_is_spread() {
        let with = |near, spread| {
            let rungs = (keys::TOPOLOGY_LADDER, "node,zone");
            ladder(&[rungs, (keys::TOPOLOGY_NEAR, near), (keys::TOPOLOGY_SPREAD, spread)])
        };
        let said = with("router:decode, router:prefill", "zone").unwrap().unwrap();
        let roles = group(&[]).spec.roles;
        let of = |name| said.role(name, &roles);
        assert_eq!(
            (of("router").near, of("prefill").near),
            (vec!["decode".to_owned(), "prefill".to_owned()], vec![])
        );
        assert_eq!(of("router").spread, 2);
        assert_eq!(with("", "none").unwrap().unwrap().spread_levels, 0);
        let only = [(keys::TOPOLOGY_LADDER, "rack=r")];
        assert_eq!(ladder(&only).unwrap().unwrap().spread_levels, 0, "nothing is said of nodes");
        assert_eq!(ladder(&[(keys::TOPOLOGY_LADDER, " ")]), Ok(None));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (key, value, text) in [
            (keys::TOPOLOGY_LADDER, "host", "`host` is no level; write node, nvlink-domain, rack or zone"),
            (keys::TOPOLOGY_LADDER, "node,", "`` is no level"),
            (keys::TOPOLOGY_LADDER, "rack", "no usual label for rack; write `rack=LABEL`"),
            (keys::TOPOLOGY_LADDER, "rack=", "`` is no key of a label"),
            (keys::TOPOLOGY_LADDER, "rack=a/b/c", "`a/b/c` is no key"),
            (keys::TOPOLOGY_LADDER, "rack=A.b/c", "is no key"),
            (keys::TOPOLOGY_LADDER, "node,node=x", "`node=x` repeats"),
            (keys::TOPOLOGY_LADDER, "rack=x,zone=x", "`zone=x` repeats"),
            (keys::TOPOLOGY_NEAR, "prefill", "`prefill` is no pair; write ROLE:ROLE"),
            (keys::TOPOLOGY_NEAR, "prefill:gpu", "`gpu` is no role of this group"),
            (keys::TOPOLOGY_SPREAD, "zone", "`zone` is no level of the ladder; write node or none"),
        ] {
            let refused = ladder(&[(keys::TOPOLOGY_LADDER, "node"), (key, value)]).unwrap_err();
            assert!(refused.contains(text) && refused.contains(key), "{refused}");
        }
        let lonely = ladder(&[(keys::TOPOLOGY_NEAR, "prefill:decode")]).unwrap_err();
        assert!(lonely.contains("without moongate.io/topology-ladder"), "{lonely}");
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,60}", near in "\\PC{0,30}", spread in "\\PC{0,10}") {
            let said = [(keys::TOPOLOGY_LADDER, &*text), (keys::TOPOLOGY_NEAR, &*near), (keys::TOPOLOGY_SPREAD, &*spread)];
            let _ = ladder(&said);
        }
    }
}
