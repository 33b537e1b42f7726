//! Which lists of a pod template are merged item by item, and by which member: `patchStrategy` and `patchMergeKey` of
//! `core/v1` and `meta/v1`, Kubernetes 1.34.

/// Lists and objects of an object, by name. What is not named is an object without merged lists, or a list that is replaced.
#[derive(Clone, Copy)]
pub(super) struct Fields(&'static [(&'static str, Field)]);

/// One member.
#[derive(Clone, Copy)]
pub(super) enum Field {
    /// An object with lists of its own.
    Object(Fields),
    /// A list of objects, told apart by a member.
    Keyed(&'static str, Fields),
    /// A list of texts, each at most once.
    Set,
    /// Anything else.
    Plain,
}

/// What a patch does with a list.
pub(super) enum ListRule {
    /// Takes its place.
    Replace,
    /// Adds to it.
    Set,
    /// Is merged item by item.
    ByKey {
        /// The member that tells items apart.
        key: &'static str,
        /// Lists and objects of an item.
        item: Fields,
    },
}

impl Fields {
    pub(super) fn get(self, name: &str) -> Field {
        self.0.iter().find(|(known, _)| *known == name).map_or(Field::Plain, |(_, field)| *field)
    }
}

impl Field {
    pub(super) fn fields(self) -> Fields {
        match self {
            Self::Object(fields) => fields,
            Self::Keyed(..) | Self::Set | Self::Plain => PLAIN,
        }
    }

    pub(super) fn list(self) -> ListRule {
        match self {
            Self::Keyed(key, item) => ListRule::ByKey { key, item },
            Self::Set => ListRule::Set,
            Self::Object(_) | Self::Plain => ListRule::Replace,
        }
    }
}

const PLAIN: Fields = Fields(&[]);

/// `core/v1` PodTemplateSpec.
pub(super) const POD_TEMPLATE: Fields =
    Fields(&[("metadata", Field::Object(METADATA)), ("spec", Field::Object(POD))]);

const METADATA: Fields =
    Fields(&[("finalizers", Field::Set), ("ownerReferences", Field::Keyed("uid", PLAIN))]);

const POD: Fields = Fields(&[
    ("containers", Field::Keyed("name", CONTAINER)),
    ("initContainers", Field::Keyed("name", CONTAINER)),
    ("ephemeralContainers", Field::Keyed("name", CONTAINER)),
    ("volumes", Field::Keyed("name", VOLUME)),
    ("imagePullSecrets", Field::Keyed("name", PLAIN)),
    ("hostAliases", Field::Keyed("ip", PLAIN)),
    ("topologySpreadConstraints", Field::Keyed("topologyKey", PLAIN)),
    ("schedulingGates", Field::Keyed("name", PLAIN)),
    ("resourceClaims", Field::Keyed("name", PLAIN)),
]);

const CONTAINER: Fields = Fields(&[
    ("env", Field::Keyed("name", PLAIN)),
    ("ports", Field::Keyed("containerPort", PLAIN)),
    ("volumeMounts", Field::Keyed("mountPath", PLAIN)),
    ("volumeDevices", Field::Keyed("devicePath", PLAIN)),
]);

const VOLUME: Fields = Fields(&[("ephemeral", Field::Object(EPHEMERAL))]);
const EPHEMERAL: Fields = Fields(&[("volumeClaimTemplate", Field::Object(CLAIM))]);
const CLAIM: Fields = Fields(&[("metadata", Field::Object(METADATA))]);
