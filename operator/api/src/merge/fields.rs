//! Lists of a pod template that are merged item by item, with their keys: `patchStrategy` and `patchMergeKey` of `core/v1`
//! and `meta/v1`, Kubernetes 1.34.

/// Lists and objects of an object, by name. Other fields are objects without merged lists, or lists that are replaced.
#[derive(Clone, Copy)]
pub(super) struct MergeSchema(&'static [(&'static str, FieldSchema)]);

/// Merge rule of one field.
#[derive(Clone, Copy)]
pub(super) enum FieldSchema {
    /// An object with lists of its own.
    Object(MergeSchema),
    /// A list of objects identified by a key field.
    Keyed(&'static str, MergeSchema),
    /// A list of unique strings.
    Set,
    /// Any field without a special rule.
    Plain,
}

/// Effect of a patch on a list.
pub(super) enum ListMergeRule {
    /// The patch replaces the list.
    Replace,
    /// The patch's strings are added.
    Set,
    /// Items are merged by their key.
    ByKey {
        /// The field that identifies items.
        key: &'static str,
        /// Merge rules of an item's fields.
        item: MergeSchema,
    },
}

impl MergeSchema {
    pub(super) fn get(self, name: &str) -> FieldSchema {
        self.0
            .iter()
            .find(|(field_name, _)| *field_name == name)
            .map_or(FieldSchema::Plain, |(_, field)| *field)
    }
}

impl FieldSchema {
    pub(super) fn fields(self) -> MergeSchema {
        match self {
            Self::Object(fields) => fields,
            Self::Keyed(..) | Self::Set | Self::Plain => PLAIN,
        }
    }

    pub(super) fn list(self) -> ListMergeRule {
        match self {
            Self::Keyed(key, item) => ListMergeRule::ByKey { key, item },
            Self::Set => ListMergeRule::Set,
            Self::Object(_) | Self::Plain => ListMergeRule::Replace,
        }
    }
}

const PLAIN: MergeSchema = MergeSchema(&[]);

pub(super) const POD_TEMPLATE: MergeSchema =
    MergeSchema(&[("metadata", FieldSchema::Object(METADATA)), ("spec", FieldSchema::Object(POD))]);

const METADATA: MergeSchema =
    MergeSchema(&[("finalizers", FieldSchema::Set), ("ownerReferences", FieldSchema::Keyed("uid", PLAIN))]);

const POD: MergeSchema = MergeSchema(&[
    ("containers", FieldSchema::Keyed("name", CONTAINER)),
    ("initContainers", FieldSchema::Keyed("name", CONTAINER)),
    ("ephemeralContainers", FieldSchema::Keyed("name", CONTAINER)),
    ("volumes", FieldSchema::Keyed("name", VOLUME)),
    ("imagePullSecrets", FieldSchema::Keyed("name", PLAIN)),
    ("hostAliases", FieldSchema::Keyed("ip", PLAIN)),
    ("topologySpreadConstraints", FieldSchema::Keyed("topologyKey", PLAIN)),
    ("schedulingGates", FieldSchema::Keyed("name", PLAIN)),
    ("resourceClaims", FieldSchema::Keyed("name", PLAIN)),
]);

const CONTAINER: MergeSchema = MergeSchema(&[
    ("env", FieldSchema::Keyed("name", PLAIN)),
    ("ports", FieldSchema::Keyed("containerPort", PLAIN)),
    ("volumeMounts", FieldSchema::Keyed("mountPath", PLAIN)),
    ("volumeDevices", FieldSchema::Keyed("devicePath", PLAIN)),
]);

const VOLUME: MergeSchema = MergeSchema(&[("ephemeral", FieldSchema::Object(EPHEMERAL))]);
const EPHEMERAL: MergeSchema = MergeSchema(&[("volumeClaimTemplate", FieldSchema::Object(CLAIM))]);
const CLAIM: MergeSchema = MergeSchema(&[("metadata", FieldSchema::Object(METADATA))]);
