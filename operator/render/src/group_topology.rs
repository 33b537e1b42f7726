//! Topology levels of a group: ordered levels, affinity between roles, and the level over which a role is spread.
//!
//! They come from annotations of the group, which are in no revision, or from the labels of the cluster's nodes. The resolved topology of
//! a role is stored in an annotation of its workload and instances, from which pods get it at creation ([`crate::affinity`]). A change of
//! the levels therefore restarts no pod: it applies to pods created later.

use rbg_api::v1alpha2::{RoleBasedGroup, RoleSpec};
use rbg_api::{RoleKind, TopologyLevel, keys};
use serde::{Deserialize, Serialize};

use crate::error::{RenderError, SharedError, TopologyAnnotationError};

/// Value of the annotations that turns levels or spreading off.
const NONE: &str = "none";
/// Value of the levels' annotation that takes them from the labels of nodes. Also the default for groups whose pods exchange data.
const AUTOMATIC: &str = "auto";
/// Maximum length of a label's name, and of the prefix before its `/`.
const MAX_NAME: usize = 63;
const MAX_PREFIX: usize = 253;

/// A topology level with the node label that identifies its domains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyKey {
    pub level: TopologyLevel,
    /// Key of the node label.
    pub label: String,
}

/// Resolved topology of one role.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleTopology {
    /// Levels of the group, nearest first.
    /// Stored as `rungs` in annotations of existing objects.
    #[serde(rename = "rungs")]
    pub levels: Vec<TopologyKey>,
    /// Roles that its pods have affinity to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub near: Vec<String>,
    /// Number of levels, from the nearest, at which only related roles have affinity; beyond them, the whole group has.
    /// Instances are spread over the domains of the last of these levels. 0: they are not spread.
    #[serde(default)]
    pub spread: usize,
    /// Whether the levels come from the labels of nodes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub automatic: bool,
}

impl RoleTopology {
    /// Parses the annotation of a workload or an instance.
    ///
    /// # Errors
    /// [`RenderError::Topology`].
    pub fn parse(text: &str) -> Result<Self, RenderError> {
        serde_json::from_str(text).map_err(|error| RenderError::Topology {
            key: keys::TOPOLOGY,
            source: SharedError::from(error).into(),
        })
    }

    #[must_use]
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Topology levels of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupTopology {
    keys: Vec<TopologyKey>,
    /// Pairs of roles: the first has affinity to the second. `None`: derived from the kinds of the roles.
    near_pairs: Option<Vec<(String, String)>>,
    spread_levels: usize,
    automatic: bool,
}

impl GroupTopology {
    /// Resolves a group's annotations; `None` without levels. `node_levels` are those that the cluster's nodes have labels of.
    ///
    /// # Errors
    /// [`RenderError::Topology`] if an annotation is invalid.
    pub fn from_group(
        group: &RoleBasedGroup,
        node_levels: &[TopologyKey],
    ) -> Result<Option<Self>, RenderError> {
        let invalid = |key, source| RenderError::Topology { key, source };
        let annotations = group.metadata.annotations.as_ref();
        let annotation_value =
            |key| annotations?.get(key).map(|text| text.trim()).filter(|text| !text.is_empty());
        let text = annotation_value(keys::TOPOLOGY_LADDER);
        if text == Some(NONE) {
            let orphan = [keys::TOPOLOGY_NEAR, keys::TOPOLOGY_SPREAD]
                .into_iter()
                .find(|key| annotation_value(key).is_some());
            return orphan.map_or(Ok(None), |key| Err(invalid(key, TopologyAnnotationError::NoLevels)));
        }
        let near_pairs = annotation_value(keys::TOPOLOGY_NEAR)
            .map(|text| parse_near_pairs(text, &group.spec.roles))
            .transpose()
            .map_err(|error| invalid(keys::TOPOLOGY_NEAR, error))?;
        let listed = text.filter(|text| *text != AUTOMATIC).map(parse_keys).transpose();
        let listed = listed.map_err(|error| invalid(keys::TOPOLOGY_LADDER, error))?;
        let automatic = listed.is_none();
        let keys = listed.unwrap_or_else(|| node_levels.to_vec());
        let spread_levels = parse_spread(annotation_value(keys::TOPOLOGY_SPREAD), &keys, automatic)
            .map_err(|error| invalid(keys::TOPOLOGY_SPREAD, error))?;
        // Every node has a name. Without another level there is nothing to choose between.
        let has_domains = keys.iter().any(|key| key.level != TopologyLevel::Node);
        let is_wanted =
            text.is_some() || near_pairs.is_some() || has_domains && exchanges_data(&group.spec.roles);
        let topology = Self { keys, near_pairs, spread_levels, automatic };
        Ok(Some(topology).filter(|topology| is_wanted && !topology.keys.is_empty()))
    }

    /// The levels, nearest first.
    #[must_use]
    pub fn levels(&self) -> &[TopologyKey] {
        &self.keys
    }

    /// Whether the levels come from the labels of nodes.
    #[must_use]
    pub fn is_automatic(&self) -> bool {
        self.automatic
    }

    /// Resolves the topology of one role.
    pub(crate) fn role(&self, name: &str, roles: &[RoleSpec]) -> RoleTopology {
        let near = match &self.near_pairs {
            Some(pairs) => pairs.iter().filter(|(from, _)| from == name).map(|(_, to)| to.clone()).collect(),
            None => related(name, roles).map(|role| role.name.clone()).collect(),
        };
        let (levels, automatic) = (self.keys.clone(), self.automatic);
        RoleTopology { levels, near, spread: self.spread_levels, automatic }
    }
}

/// Whether pods of the group exchange data, so that their distance matters: roles that transfer KV cache, or instances of several pods.
/// Single engines without a store do not, and are better placed in different domains.
fn exchanges_data(roles: &[RoleSpec]) -> bool {
    roles.iter().any(|role| {
        let worker_pods = role.leader_worker_pattern.as_ref().and_then(|pattern| pattern.size).unwrap_or(1);
        let components = role.custom_components_pattern.iter().flat_map(|pattern| &pattern.components);
        let component_pods = components.map(|component| i64::from(component.size())).sum::<i64>();
        worker_pods > 1 || component_pods > 1 || related(&role.name, roles).next().is_some()
    })
}

/// Roles that a role of this name transfers data to, by the kinds in their names.
fn related<'a>(name: &str, roles: &'a [RoleSpec]) -> impl Iterator<Item = &'a RoleSpec> {
    let wanted = related_roles(RoleKind::from_role_name(name));
    roles
        .iter()
        .filter(move |role| RoleKind::from_role_name(&role.name).is_some_and(|kind| wanted.contains(&kind)))
}

/// Prefills transfer KV cache to decodes; engines read from the store, which needs no network on the same node.
fn related_roles(kind: Option<RoleKind>) -> &'static [RoleKind] {
    match kind {
        Some(RoleKind::Prefill) => &[RoleKind::Decode],
        Some(RoleKind::Store) => &[RoleKind::Prefill, RoleKind::Plain],
        Some(RoleKind::Decode | RoleKind::Plain) | None => &[],
    }
}

fn parse_keys(text: &str) -> Result<Vec<TopologyKey>, TopologyAnnotationError> {
    let mut levels: Vec<TopologyKey> = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (name, label) =
            part.split_once('=').map_or((part, None), |(name, label)| (name.trim(), Some(label.trim())));
        let level = TopologyLevel::parse(name)
            .ok_or_else(|| TopologyAnnotationError::UnknownLevel(name.to_owned()))?;
        let label = label
            .or(level.default_label())
            .ok_or_else(|| TopologyAnnotationError::NoDefaultLabel(name.to_owned()))?;
        if !is_label_key(label) {
            return Err(TopologyAnnotationError::InvalidLabelKey(label.to_owned()));
        }
        if levels.iter().any(|key| key.level == level || key.label == label) {
            return Err(TopologyAnnotationError::Repeated(part.to_owned()));
        }
        levels.push(TopologyKey { level, label: label.to_owned() });
    }
    Ok(levels)
}

fn parse_near_pairs(
    text: &str,
    roles: &[RoleSpec],
) -> Result<Vec<(String, String)>, TopologyAnnotationError> {
    let role = |name: &str| {
        let name = name.trim();
        let found = roles.iter().find(|role| role.name == name);
        found
            .map(|role| role.name.clone())
            .ok_or_else(|| TopologyAnnotationError::UnknownRole(name.to_owned()))
    };
    let pair = |part: &str| {
        let (from, to) =
            part.split_once(':').ok_or_else(|| TopologyAnnotationError::NotAPair(part.trim().to_owned()))?;
        Ok((role(from)?, role(to)?))
    };
    text.split(',').map(pair).collect()
}

/// Number of levels up to the spread level. Automatic levels may lack it.
fn parse_spread(
    annotation_value: Option<&str>,
    levels: &[TopologyKey],
    automatic: bool,
) -> Result<usize, TopologyAnnotationError> {
    let at = |level: TopologyLevel| levels.iter().position(|key| key.level == level).map(|at| at + 1);
    let name = match annotation_value {
        None => return Ok(at(TopologyLevel::Node).unwrap_or(0)),
        Some(NONE) => return Ok(0),
        Some(name) => name,
    };
    let level = TopologyLevel::parse(name);
    if automatic && let Some(level) = level {
        return Ok(at(level).unwrap_or(0));
    }
    level.and_then(at).ok_or_else(|| {
        let possible: Vec<TopologyLevel> = match automatic {
            true => TopologyLevel::ALL.to_vec(),
            false => levels.iter().map(|key| key.level).collect(),
        };
        let levels = possible.into_iter().map(TopologyLevel::name).collect();
        TopologyAnnotationError::NotOfGroup { level: name.to_owned(), levels }
    })
}

/// `[prefix/]name`, as Kubernetes defines label keys.
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

    fn group(annotations: &[(&str, &str)]) -> RoleBasedGroup {
        let annotations: BTreeMap<&str, &str> = annotations.iter().copied().collect();
        let roles = NAMES.map(|name| json!({ "name": name }));
        let metadata = json!({ "name": "g", "annotations": annotations });
        serde_json::from_value(json!({ "metadata": metadata, "spec": { "roles": roles } })).unwrap()
    }

    fn topology(annotations: &[(&str, &str)]) -> Result<Option<GroupTopology>, String> {
        GroupTopology::from_group(&group(annotations), &[]).map_err(|error| error.to_string())
    }

    #[test]
    fn default_affinity_follows_the_kinds_of_roles() {
        let annotations = [(keys::TOPOLOGY_LADDER, "nvlink-domain, node, rack = example.com/rack, zone")];
        let topology = topology(&annotations).unwrap().unwrap();
        let roles = group(&[]).spec.roles;
        let of = |name| topology.role(name, &roles);
        let labels = [
            "nvidia.com/gpu.clique",
            "kubernetes.io/hostname",
            "example.com/rack",
            "topology.kubernetes.io/zone",
        ];
        assert_eq!(of("router").levels.iter().map(|key| key.label.as_str()).collect::<Vec<_>>(), labels);
        let near = NAMES.map(|name| of(name).near.join(" "));
        assert_eq!(near, ["", "decode", "", "prefill", ""]);
        assert_eq!(of("decode").spread, 2, "spread over nodes");
    }

    #[test]
    fn annotations_set_affinity_pairs_and_spread() {
        let with = |near, spread| {
            let levels = (keys::TOPOLOGY_LADDER, "node,zone");
            topology(&[levels, (keys::TOPOLOGY_NEAR, near), (keys::TOPOLOGY_SPREAD, spread)])
        };
        let parsed = with("router:decode, router:prefill", "zone").unwrap().unwrap();
        let roles = group(&[]).spec.roles;
        let of = |name| parsed.role(name, &roles);
        assert_eq!(
            (of("router").near, of("prefill").near),
            (vec!["decode".to_owned(), "prefill".to_owned()], vec![])
        );
        assert_eq!(of("router").spread, 2);
        assert_eq!(with("", "none").unwrap().unwrap().spread_levels, 0);
        let only = [(keys::TOPOLOGY_LADDER, "rack=r")];
        assert_eq!(topology(&only).unwrap().unwrap().spread_levels, 0, "no node level");
        assert_eq!(topology(&[(keys::TOPOLOGY_LADDER, " ")]), Ok(None));
    }

    #[test]
    fn errors_name_the_invalid_value() {
        for (key, value, text) in [
            (keys::TOPOLOGY_LADDER, "host", "`host` is not a level; use auto, none, or a list of node,"),
            (keys::TOPOLOGY_LADDER, "node,", "`` is not a level"),
            (keys::TOPOLOGY_LADDER, "rack", "rack has no default label; use `rack=LABEL`"),
            (keys::TOPOLOGY_LADDER, "rack=", "`` is not a label key"),
            (keys::TOPOLOGY_LADDER, "rack=a/b/c", "`a/b/c` is not a label key"),
            (keys::TOPOLOGY_LADDER, "rack=A.b/c", "is not a label key"),
            (keys::TOPOLOGY_LADDER, "node,node=x", "`node=x` repeats"),
            (keys::TOPOLOGY_LADDER, "rack=x,zone=x", "`zone=x` repeats"),
            (keys::TOPOLOGY_NEAR, "prefill", "`prefill` is not a pair; use ROLE:ROLE"),
            (keys::TOPOLOGY_NEAR, "prefill:gpu", "`gpu` is not a role of this group"),
            (keys::TOPOLOGY_SPREAD, "zone", "`zone` is not a level of the group; use node or none"),
        ] {
            let error = topology(&[(keys::TOPOLOGY_LADDER, "node"), (key, value)]).unwrap_err();
            assert!(error.contains(text) && error.contains(key), "{error}");
        }
        let orphan = [(keys::TOPOLOGY_LADDER, "none"), (keys::TOPOLOGY_NEAR, "prefill:decode")];
        let orphan = topology(&orphan).unwrap_err();
        assert!(orphan.contains("with moongate.io/topology-ladder: none"), "{orphan}");
        let unknown = topology(&[(keys::TOPOLOGY_SPREAD, "host")]).unwrap_err();
        assert!(unknown.contains("`host` is not a level"), "{unknown}");
    }

    #[test]
    fn levels_of_nodes_are_the_default() {
        let node_levels = parse_keys("node,nvlink-domain,rack=r").unwrap();
        let of = |annotations: &[(&str, &str)], roles: serde_json::Value| {
            let mut group = group(annotations);
            group.spec.roles = serde_json::from_value(roles).unwrap();
            GroupTopology::from_group(&group, &node_levels).unwrap().map(|topology| {
                let levels = topology.levels().iter().map(|key| key.level.name());
                (levels.collect::<Vec<_>>().join(" "), topology.spread_levels, topology.automatic)
            })
        };
        let pair = json!([{ "name": "prefill" }, { "name": "decode" }]);
        let plain = json!([{ "name": "worker", "replicas": 4 }]);
        let workers = json!([{ "name": "worker", "leaderWorkerPattern": { "size": 2 } }]);
        let all = Some(("node nvlink-domain rack".to_owned(), 1, true));
        assert_eq!(of(&[], pair.clone()), all);
        assert_eq!(of(&[], workers), all);
        assert_eq!(of(&[], plain.clone()), None, "these pods exchange no data");
        assert_eq!(of(&[(keys::TOPOLOGY_LADDER, "auto")], plain), all);
        assert_eq!(of(&[(keys::TOPOLOGY_LADDER, "none")], pair.clone()), None);
        let mut single: RoleBasedGroup = group(&[]);
        single.spec.roles = serde_json::from_value(pair.clone()).unwrap();
        let names_only = parse_keys("node").unwrap();
        assert!(GroupTopology::from_group(&single, &names_only).unwrap().is_none(), "every node has a name");
        let listed = [(keys::TOPOLOGY_LADDER, "rack=x")];
        assert_eq!(of(&listed, pair.clone()), Some(("rack".to_owned(), 0, false)));
        let spread = |level| of(&[(keys::TOPOLOGY_SPREAD, level)], pair.clone()).unwrap().1;
        assert_eq!((spread("rack"), spread("zone"), spread("none")), (3, 0, 0));
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,60}", near in "\\PC{0,30}", spread in "\\PC{0,10}") {
            let annotations = [(keys::TOPOLOGY_LADDER, &*text), (keys::TOPOLOGY_NEAR, &*near), (keys::TOPOLOGY_SPREAD, &*spread)];
            let _ = topology(&annotations);
        }
    }
}
