//! Conversion between v1alpha1 and v1alpha2, for the webhook and for tools that edit either version.
//!
//! It works on JSON, so that fields which this release does not know pass through. The mapping itself (`spec`) loses what
//! the other version cannot express. The loss is determined by mapping back and comparing, and is stored on the converted
//! object in an annotation ([`remainder`]); the conversion back restores it wherever the field has not been edited. Round
//! trips therefore yield the same object in both directions, and edits through either version survive.
//!
//! Groups that were written as v1alpha1 also have their pod templates at v1alpha1's paths in v1alpha2 ([`mirror`]).

mod mirror;
mod remainder;
mod role;
mod spec;

use serde_json::{Map, Value};

use crate::template::member_object;
pub use mirror::{FoldedGroup, copy_mirror, fold_group, fold_mirrors, remove_mirror, without_mirrors};
use remainder::FieldChange;
use spec::SpecLocation;

/// Prefix of the annotations that conversion adds.
pub const PREFIX: &str = "conversion.workloads.x-k8s.io/";
/// Annotation of a v1alpha2 object that was written as v1alpha1. Its pods also get the labels and environment names of
/// v1alpha1.
pub const ORIGIN: &str = "conversion.workloads.x-k8s.io/origin";
/// Annotation of a v1alpha2 object: `spec.podGroupPolicy` of v1alpha1, as JSON.
pub const POD_GROUP_POLICY: &str = "conversion.workloads.x-k8s.io/v1alpha1-pod-group-policy";
/// Annotation of a v1alpha2 object: `spec.coordination` of v1alpha1, as JSON.
pub const COORDINATION: &str = "conversion.workloads.x-k8s.io/v1alpha1-coordination";

const OF_V1ALPHA1: &str = "conversion.workloads.x-k8s.io/v1alpha1-remainder";
const OF_V1ALPHA2: &str = "conversion.workloads.x-k8s.io/v1alpha2-remainder";

/// A version of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApiVersion {
    /// The deprecated version, served by conversion.
    V1alpha1,
    /// The version that is stored.
    V1alpha2,
}

impl ApiVersion {
    /// The `apiVersion` field of its objects.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Self::V1alpha1 => "workloads.x-k8s.io/v1alpha1",
            Self::V1alpha2 => "workloads.x-k8s.io/v1alpha2",
        }
    }

    /// Finds the version by its `apiVersion`.
    #[must_use]
    pub fn parse(api_version: &str) -> Option<Self> {
        [Self::V1alpha1, Self::V1alpha2].into_iter().find(|version| version.api_version() == api_version)
    }
}

/// Error that prevents a conversion.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConversionError {
    /// The `apiVersion` is none of ours.
    #[error("apiVersion `{0}` is neither workloads.x-k8s.io/v1alpha1 nor workloads.x-k8s.io/v1alpha2")]
    Version(String),
    /// The kind exists in one version only.
    #[error("objects of kind `{0}` are not converted")]
    Kind(String),
    /// The value is not an object.
    #[error("the object to convert is not a map")]
    NotAMap,
}

/// Converts `object` to a version; returns it unchanged if it already has that version.
///
/// # Errors
/// See [`ConversionError`].
pub fn convert(object: &Value, to: ApiVersion) -> Result<Value, ConversionError> {
    let mut object = object.as_object().ok_or(ConversionError::NotAMap)?.clone();
    let text = |name: &str| object.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let from =
        ApiVersion::parse(&text("apiVersion")).ok_or_else(|| ConversionError::Version(text("apiVersion")))?;
    if from == to {
        return Ok(Value::Object(object));
    }
    let location = match text("kind").as_str() {
        "RoleBasedGroup" => SpecLocation::Group,
        "RoleBasedGroupSet" => SpecLocation::Set,
        "RoleBasedGroupScalingAdapter" | "ClusterEngineRuntimeProfile" => {
            object.insert("apiVersion".to_owned(), to.api_version().into());
            return Ok(Value::Object(object));
        }
        kind => return Err(ConversionError::Kind(kind.to_owned())),
    };
    let (incoming, outgoing) = match to {
        ApiVersion::V1alpha2 => (OF_V1ALPHA2, OF_V1ALPHA1),
        ApiVersion::V1alpha1 => (OF_V1ALPHA1, OF_V1ALPHA2),
    };
    let is_group = location == SpecLocation::Group;
    if is_group && to == ApiVersion::V1alpha1 {
        // Before losses are determined: what they restore must not revert the edit of a mirror.
        mirror::fold_and_remove(&mut object);
    }
    let restored = take_remainder(&mut object, incoming);
    let original = Value::Object(object);
    let mut converted = spec::convert_object(&original, to, location);
    restored.iter().for_each(|change| change.apply(&mut converted));
    let losses = FieldChange::diff(&spec::convert_object(&converted, from, location), &original);
    if !losses.is_empty()
        && let (Ok(text), Value::Object(converted)) = (serde_json::to_string(&losses), &mut converted)
    {
        member_object(member_object(converted, "metadata"), "annotations")
            .insert(outgoing.to_owned(), text.into());
    }
    if is_group
        && to == ApiVersion::V1alpha2
        && let Value::Object(converted) = &mut converted
    {
        mirror::add(converted);
    }
    Ok(converted)
}

/// Removes the annotation and returns its changes. Unreadable and forbidden changes are dropped.
fn take_remainder(object: &mut Map<String, Value>, annotation: &str) -> Vec<FieldChange> {
    let text = annotations_mut(object).and_then(|annotations| annotations.remove(annotation));
    drop_empty_annotations(object);
    let text = text.as_ref().and_then(Value::as_str);
    let mut changes: Vec<FieldChange> =
        text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    changes.retain(FieldChange::is_allowed);
    changes
}

fn annotations_mut(object: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    object.get_mut("metadata")?.get_mut("annotations")?.as_object_mut()
}

fn drop_empty_annotations(object: &mut Map<String, Value>) {
    if annotations_mut(object).is_some_and(|annotations| annotations.is_empty())
        && let Some(Value::Object(metadata)) = object.get_mut("metadata")
    {
        metadata.remove("annotations");
    }
}
